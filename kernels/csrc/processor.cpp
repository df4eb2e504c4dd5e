#include "processor.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace onnxtrain {

namespace {

constexpr Level levels[] = {Level::Baseline, Level::Avx2, Level::Avx512};

// CMakeLists.txt says which levels are compiled.
constexpr bool is_compiled(Level level) {
  switch (level) {
#if defined(ONNXTRAIN_HAS_BASELINE)
    case Level::Baseline:
#endif
#if defined(ONNXTRAIN_HAS_AVX2)
    case Level::Avx2:
#endif
#if defined(ONNXTRAIN_HAS_AVX512)
    case Level::Avx512:
#endif
      return true;
    default:
      return false;
  }
}

#if defined(__x86_64__)

// A bit of what CPUID tells: its leaf, and its place in EBX or ECX.
struct Instruction {
  Level level;
  const char* name;
  unsigned leaf;
  bool in_ecx;
  int bit;
};

// All that compilers use for x86-64-v2, -v3 and -v4, which CMakeLists.txt compiles the levels for (System V ABI, AMD64
// supplement 1.0, table 3.1). Clang 14's __builtin_cpu_supports knows neither LZCNT nor MOVBE nor F16C.
constexpr Instruction instructions[] = {
    {Level::Baseline, "sse3", 1, true, 0},
    {Level::Baseline, "ssse3", 1, true, 9},
    {Level::Baseline, "cmpxchg16b", 1, true, 13},
    {Level::Baseline, "sse4.1", 1, true, 19},
    {Level::Baseline, "sse4.2", 1, true, 20},
    {Level::Baseline, "popcnt", 1, true, 23},
    {Level::Baseline, "lahf", 0x80000001, true, 0},
    {Level::Avx2, "fma", 1, true, 12},
    {Level::Avx2, "movbe", 1, true, 22},
    {Level::Avx2, "osxsave", 1, true, 27},
    {Level::Avx2, "avx", 1, true, 28},
    {Level::Avx2, "f16c", 1, true, 29},
    {Level::Avx2, "bmi1", 7, false, 3},
    {Level::Avx2, "avx2", 7, false, 5},
    {Level::Avx2, "bmi2", 7, false, 8},
    {Level::Avx2, "lzcnt", 0x80000001, true, 5},
    {Level::Avx512, "avx512f", 7, false, 16},
    {Level::Avx512, "avx512dq", 7, false, 17},
    {Level::Avx512, "avx512cd", 7, false, 28},
    {Level::Avx512, "avx512bw", 7, false, 30},
    {Level::Avx512, "avx512vl", 7, false, 31},
};

// By CPUID and not by __builtin_cpu_supports: the library that it reads is linked neither by Clang on Windows nor by Zig.
bool has(const Instruction& instruction) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(instruction.leaf, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (instruction.in_ecx ? ecx : ebx) >> instruction.bit & 1u;
}

// Whether the operating system keeps the registers of a level when it switches threads: bits of XCR0, which tells of SSE
// and AVX, and of masks and the upper halves and the upper sixteen of AVX-512.
bool keeps_registers(Level level) {
  if (level == Level::Baseline) return true;
  constexpr Instruction osxsave{Level::Avx2, "osxsave", 1, true, 27};
  if (!has(osxsave)) return false;  // without it, XGETBV is no instruction
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const unsigned needed = level == Level::Avx2 ? 0x6 : 0xe6;
  return (low & needed) == needed;
}

bool names(std::string_view list, std::string_view name) {
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    if (list.substr(begin, end - begin) == name) return true;
    begin = end + 1;
  }
  return false;
}

bool runs(Level level, std::string_view without) {
  return keeps_registers(level) && std::all_of(std::begin(instructions), std::end(instructions), [&](const Instruction& own) {
    return own.level != level || (has(own) && !names(without, own.name));
  });
}

#else

bool runs(Level level, std::string_view) { return level == Level::Baseline; }

#endif

}  // namespace

bool has_avx512_bf16() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1u);
#else
  return false;
#endif
}

namespace {

// The highest level that the processor runs. It is asked once: under a hypervisor, CPUID takes tens of microseconds.
Level highest_level() {
  static const Level highest = [] {
    Level found = Level::None;
    for (const Level level : levels) {
      if (!runs(level, {})) break;  // each level has all instructions of those below it
      found = level;
    }
    return found;
  }();
  return highest;
}

}  // namespace

const char* name_of(Level level) {
  constexpr const char* all[] = {"", "baseline", "avx2", "avx512"};
  return all[static_cast<int>(level)];
}

Level level_for(const char* asked, std::string_view without) {
  Level best = Level::None;
  for (const Level level : levels) {
    if (without.empty() ? level > highest_level() : !runs(level, without)) break;
    if (!is_compiled(level)) continue;
    best = level;
    if (asked != nullptr && std::strcmp(asked, name_of(level)) == 0) break;
  }
  return best;
}

}  // namespace onnxtrain
