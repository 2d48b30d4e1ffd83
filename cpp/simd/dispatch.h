// Which instruction set the kernels use.
#pragma once

#include <string>
#include <vector>

#include "simd/kernels.h"

namespace offload {

enum class Level { scalar, neon, avx2, avx512 };

const char* name_of(Level level);
// Those this CPU can run, best first.
std::vector<Level> available_levels();
// Throws std::invalid_argument, naming the choices, when `name` is unknown or this CPU lacks it.
Level level_named(const std::string& name);
// OFFLOAD_SIMD where it is set, else the best; read once, at first use.
Level current_level();
const Kernels& kernels_of(Level level);

}  // namespace offload
