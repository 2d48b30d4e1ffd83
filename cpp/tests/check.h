// Checks that hold in every build type; a failed one says where and ends the test.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

// Whether an emulator runs the test: slow, and some fail where a process that has threads forks.
inline bool emulated() { return std::getenv("OFFLOAD_TEST_EMULATED") != nullptr; }

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

// The text of the exception that `call` throws.
#define CHECK_THROWS(type, call, text)                                                        \
  do {                                                                                        \
    std::string said = "nothing";                                                             \
    bool thrown = false;                                                                      \
    try {                                                                                     \
      call;                                                                                   \
    } catch (const type& error) {                                                             \
      thrown = true;                                                                          \
      said = error.what();                                                                    \
    }                                                                                         \
    if (!thrown || said.find(text) == std::string::npos) {                                    \
      std::fprintf(stderr, "%s:%d: %s threw: %s\n", __FILE__, __LINE__, #call, said.c_str()); \
      std::_Exit(1);                                                                          \
    }                                                                                         \
  } while (false)
