// Page-aligned memory for transfers whose own address or edges direct I/O cannot take.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "io/file.h"

namespace offload::io {

class Buffer {
 public:
  char* data() const { return data_.get(); }
  void reserve(size_t nbytes) {
    if (nbytes <= nbytes_) return;
    void* fresh = nullptr;
    if (::posix_memalign(&fresh, kBlockBytesMin, nbytes) != 0) throw std::bad_alloc();
    data_.reset(static_cast<char*>(fresh));
    nbytes_ = nbytes;
  }
  void release() {
    data_.reset();
    nbytes_ = 0;
  }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  size_t nbytes_ = 0;
};

}  // namespace offload::io
