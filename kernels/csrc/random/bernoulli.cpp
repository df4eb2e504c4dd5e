// Bernoulli draws of PyTorch's CPU generator: the same numbers as `torch.Tensor.bernoulli_`, by vectors.
//
// The generator is the Mersenne Twister MT19937 (Matsumoto and Nishimura, "Mersenne Twister: A 623-dimensionally
// equidistributed uniform pseudo-random number generator", ACM TOMACS 8, 1998).
#include "random/bernoulli.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

constexpr size_t words = 624, middle = 397;

// What `torch.Generator.get_state` returns, up to what normal distributions keep.
struct GeneratorState {
  uint64_t seed;
  int32_t left;  // 1 where all words have been drawn, so that new ones are due
  int32_t seeded;
  uint64_t next;
  uint64_t word[words];
};

inline uint32_t twisted(uint32_t from, uint32_t upper, uint32_t lower) {
  const uint32_t mixed = (upper & 0x80000000u) | (lower & 0x7fffffffu);
  return from ^ (mixed >> 1) ^ (-(mixed & 1u) & 0x9908b0dfu);
}

inline uint32_t tempered(uint32_t y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

void advance(uint32_t* word) {
  size_t i = 0;
  for (; i < words - middle; ++i) word[i] = twisted(word[i + middle], word[i], word[i + 1]);
  for (; i < words - 1; ++i) word[i] = twisted(word[i + middle - words], word[i], word[i + 1]);
  word[i] = twisted(word[middle - 1], word[i], word[0]);
}

// A number of 53 bits, of which the first word has the upper 21, is compared with 2^53 p.
struct Threshold {
  uint32_t upper, lower;

  explicit Threshold(double p) {
    const auto all = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
    upper = static_cast<uint32_t>(all >> 32);
    lower = static_cast<uint32_t>(all);
  }
  uint8_t above(uint32_t first, uint32_t second) const {
    first &= 0x1fffffu;
    return static_cast<uint8_t>((first < upper) | ((first == upper) & (second < lower)));
  }
};

}  // namespace

// Writes n draws, 1 with probability p and 0 otherwise, and advances the generator, of which `generator` is the state
// that PyTorch gives.
void draw_bernoulli(unsigned char* generator, double p, uint8_t* to, size_t n) {
  GeneratorState state;
  std::memcpy(&state, generator, sizeof state);
  uint32_t word[words], drawn[words];
  for (size_t i = 0; i < words; ++i) word[i] = static_cast<uint32_t>(state.word[i]);
  size_t next = state.left == 1 ? words : static_cast<size_t>(state.next);
  const Threshold threshold(p);
  uint32_t odd = 0;  // the first word of a draw whose second one is the first of the next 624
  bool is_half = false;
  while (n > 0) {
    if (next == words) {
      advance(word);
      next = 0;
    }
    if (is_half) {
      *to++ = threshold.above(odd, tempered(word[next++]));
      --n;
      is_half = false;
    }
    const size_t pairs = std::min((words - next) / 2, n);
    for (size_t i = 0; i < 2 * pairs; ++i) drawn[i] = tempered(word[next + i]);
    for (size_t i = 0; i < pairs; ++i) to[i] = threshold.above(drawn[2 * i], drawn[2 * i + 1]);
    to += pairs;
    n -= pairs;
    next += 2 * pairs;
    if (n > 0 && next == words - 1) {
      odd = tempered(word[next++]);
      is_half = true;
    }
  }
  for (size_t i = 0; i < words; ++i) state.word[i] = word[i];
  state.next = next;
  state.left = static_cast<int32_t>(words + 1 - next);
  std::memcpy(generator, &state, sizeof state);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
