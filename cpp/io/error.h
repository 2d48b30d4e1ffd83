// What a failed transfer says: the file, the extent and the kernel's words.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace offload::io {

class IoError : public std::runtime_error {
 public:
  IoError(int code, std::string path, const std::string& message)
      : std::runtime_error(message), code_(code), path_(std::move(path)) {}
  int code() const { return code_; }  // errno, 0 where the kernel said nothing
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// The engine cannot run here: the kernel or the build lacks it.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "No space left on device (ENOSPC)".
std::string errno_text(int code);

}  // namespace offload::io
