#include "simd/dispatch.h"

#ifdef OFFLOAD_SIMD_X86
#include <cpuid.h>
#endif

#include <cstdlib>
#include <stdexcept>

namespace offload {
#ifdef OFFLOAD_SIMD_X86
namespace {

bool has_f16c() {  // not a name that every compiler's __builtin_cpu_supports knows
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

}  // namespace
#endif

const char* name_of(Level level) {
  switch (level) {
    case Level::avx512:
      return "avx512";
    case Level::avx2:
      return "avx2";
    case Level::neon:
      return "neon";
    case Level::scalar:
      break;
  }
  return "scalar";
}

std::vector<Level> available_levels() {
  std::vector<Level> levels;
#ifdef OFFLOAD_SIMD_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    levels.push_back(Level::avx512);
  if (avx2) levels.push_back(Level::avx2);
#endif
#ifdef OFFLOAD_SIMD_NEON
  levels.push_back(Level::neon);  // every AArch64 CPU has it
#endif
  levels.push_back(Level::scalar);
  return levels;
}

Level level_named(const std::string& name) {
  std::string choices;
  for (Level level : available_levels()) {
    if (name == name_of(level)) return level;
    choices += (choices.empty() ? "" : ", ") + std::string(name_of(level));
  }
  throw std::invalid_argument("no SIMD level \"" + name + "\" on this CPU: choose one of " + choices);
}

Level current_level() {
  static const Level level = [] {
    const char* asked = std::getenv("OFFLOAD_SIMD");
    if (!asked || !*asked) return available_levels().front();
    try {
      return level_named(asked);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string("OFFLOAD_SIMD: ") + error.what());
    }
  }();
  return level;
}

const Kernels& kernels_of(Level level) {
#ifdef OFFLOAD_SIMD_X86
  if (level == Level::avx512) return kernels_avx512;
  if (level == Level::avx2) return kernels_avx2;
#endif
#ifdef OFFLOAD_SIMD_NEON
  if (level == Level::neon) return kernels_neon;
#endif
  (void)level;
  return kernels_scalar;
}

}  // namespace offload
