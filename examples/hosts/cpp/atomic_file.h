// Replaces a file so that a killed process or a loss of power leaves either the old content or the new one.
#pragma once

#include <cstddef>
#include <filesystem>

class AtomicFile {
 public:
  // Creates `<path>.tmp`. All methods throw std::runtime_error, which names the file and the reason.
  explicit AtomicFile(const std::filesystem::path& path);
  // Removes `<path>.tmp` unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, size_t count);

  // Flushes the content to the disk, renames the file to `path`, and flushes the rename.
  void commit();

 private:
  [[noreturn]] void fail(const char* doing) const;
  void close();

  std::filesystem::path path_, temporary_;
#if defined(_WIN32)
  void* file_;  // HANDLE
#else
  int file_;
#endif
};
