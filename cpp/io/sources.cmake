target_sources(offload_core PRIVATE
  cpp/io/checksum.cpp
  cpp/io/digest.cpp
  cpp/io/engine.cpp
  cpp/io/error.cpp
  cpp/io/faults.cpp
  cpp/io/file.cpp
  cpp/io/piece.cpp
  cpp/io/sums.cpp
  cpp/io/threads.cpp
  cpp/io/transfer.cpp
  cpp/io/uring.cpp)

if(OFFLOAD_WITH_URING)
  find_path(URING_INCLUDE_DIR liburing.h)
  find_library(URING_LIBRARY uring)
  if(URING_INCLUDE_DIR AND URING_LIBRARY)
    message(STATUS "io_uring: ${URING_LIBRARY}")
    target_include_directories(offload_core SYSTEM PRIVATE ${URING_INCLUDE_DIR})
    target_link_libraries(offload_core PRIVATE ${URING_LIBRARY})
    target_compile_definitions(offload_core PRIVATE OFFLOAD_HAVE_URING)
    include(CheckCXXSymbolExists)
    set(CMAKE_REQUIRED_INCLUDES ${URING_INCLUDE_DIR})
    set(CMAKE_REQUIRED_LIBRARIES ${URING_LIBRARY})
    check_cxx_symbol_exists(io_uring_register_buffers_sparse liburing.h OFFLOAD_URING_IS_2_2)
    unset(CMAKE_REQUIRED_INCLUDES)
    unset(CMAKE_REQUIRED_LIBRARIES)
    if(OFFLOAD_URING_IS_2_2)
      target_compile_definitions(offload_core PRIVATE OFFLOAD_URING_REGISTERS)
    else()
      message(STATUS "liburing is older than 2.2: files and memory are not registered with the kernel")
    endif()
  else()
    message(WARNING "liburing not found (Debian: apt-get install liburing-dev): built without io_uring, file I/O uses threads")
  endif()
else()
  message(STATUS "io_uring: off")
endif()
