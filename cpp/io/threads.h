// The engine that works everywhere: a pool of threads, each with one pread or pwrite at a time.
#pragma once

#include <thread>
#include <vector>

#include "io/engine.h"

namespace offload::io {

class ThreadEngine : public Engine {
 public:
  explicit ThreadEngine(EngineOptions options);
  ~ThreadEngine() override { close(); }
  const char* kind() const override { return "threads"; }

 protected:
  struct Deferred {};
  ThreadEngine(EngineOptions options, Deferred);  // a subclass calls start() when it is complete
  void start();
  // Asks the kernel once: bytes moved or -errno.
  virtual int64_t attempt(const Piece& piece);
  void stop() override;

 private:
  void work();
  std::vector<std::thread> threads_;
};

}  // namespace offload::io
