// SHA-256 (FIPS 180-4), by which a delta recognises the parameters that it goes on top of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

class Sha256 {
 public:
  Sha256& update(const void* bytes, size_t count);
  Sha256& update(const std::string& text) { return update(text.data(), text.size()); }

  // Ends the message and returns its digest as 64 hexadecimal digits. Call it once.
  std::string hex();

 private:
  void compress();

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;    // bytes in the block
  uint64_t length_ = 0;  // bytes of the message
};
