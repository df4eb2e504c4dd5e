// The levels that ops are compiled for, and which of them this processor can run.
#pragma once

#include <string_view>

namespace onnxtrain {

enum class Level : int { None, Baseline, Avx2, Avx512 };

const char* name_of(Level level);

// Returns the level `asked` for (null: the best), or the next best that is there: one that is compiled, and of which the
// processor has every instruction. None where the processor lacks some of the lowest level's. Instructions that are
// named in `without`, separated by commas, count as missing.
Level level_for(const char* asked, std::string_view without = {});

// Whether the processor has AVX512_BF16, which code of the level AVX-512 uses where it is there.
bool has_avx512_bf16();

}  // namespace onnxtrain
