// A directory that is gone when the test ends.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"

class Scratch {
 public:
  Scratch() {
    char name[] = "offload-test-XXXXXX";
    CHECK(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Scratch() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    ::rmdir(path_.c_str());
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string file(const std::string& name) {
    files_.push_back(path_ + "/" + name);
    return files_.back();
  }

 private:
  std::string path_;
  std::vector<std::string> files_;
};
