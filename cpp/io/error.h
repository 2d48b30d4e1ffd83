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
  // A runtime_error shares its text with its copies; one that is thrown in several threads must not.
  IoError(const IoError& other) : IoError(other.code_, other.path_, std::string(other.what())) {}
  IoError& operator=(const IoError& other) {
    const IoError own(other);
    std::runtime_error::operator=(own);
    code_ = own.code_;
    path_ = own.path_;
    return *this;
  }
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
std::string way_out(int code);  // what a user can do about it

}  // namespace offload::io
