# One kernel body, compiled once per instruction set; dispatch.cpp chooses at run time.
set(OFFLOAD_SIMD_X86 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(OFFLOAD_SIMD_X86 ON)
endif()
set(OFFLOAD_SIMD_NEON OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(OFFLOAD_SIMD_NEON ON)
endif()

target_sources(offload_core PRIVATE
  cpp/simd/adam.cpp
  cpp/simd/copy.cpp
  cpp/simd/dispatch.cpp
  cpp/simd/heap.cpp
  cpp/simd/hyper.cpp
  cpp/simd/land.cpp
  cpp/simd/target_scalar.cpp
  cpp/simd/thread_pool.cpp
  cpp/simd/topology.cpp
  cpp/simd/update.cpp)

if(OFFLOAD_SIMD_X86)
  target_sources(offload_core PRIVATE cpp/simd/target_avx2.cpp cpp/simd/target_avx512.cpp)
  target_compile_definitions(offload_core PRIVATE OFFLOAD_SIMD_X86)
  set_source_files_properties(cpp/simd/target_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  # GCC 12 warns of its own intrinsics (bug 105593).
  set(quiet "$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>")
  set_source_files_properties(cpp/simd/target_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;${quiet}")
endif()

if(OFFLOAD_SIMD_NEON)
  target_sources(offload_core PRIVATE cpp/simd/target_neon.cpp)
  target_compile_definitions(offload_core PRIVATE OFFLOAD_SIMD_NEON)
  # GCC thinks four registers' worth too much to inline, and hands them over in memory.
  set_source_files_properties(cpp/simd/target_neon.cpp PROPERTIES COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:\
-finline-limit=20000;--param=early-inlining-insns=1000;--param=inline-unit-growth=2000;\
--param=large-function-growth=3000>")
endif()
