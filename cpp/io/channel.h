// A file and the engine that serves it: what the rest of the program reads from and writes to.
#pragma once

#include <memory>
#include <utility>

#include "io/engine.h"

namespace offload::io {

struct Channel {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<File> file;

  // As Engine::submit.
  std::shared_ptr<Transfer> read(uint64_t offset, void* data, uint64_t nbytes, std::shared_ptr<void> keep = nullptr,
                                 Transfer::Callback callback = nullptr) const {
    return engine->submit(file, false, offset, data, nbytes, std::move(keep), std::move(callback));
  }
  std::shared_ptr<Transfer> write(uint64_t offset, void* data, uint64_t nbytes, std::shared_ptr<void> keep = nullptr,
                                  Transfer::Callback callback = nullptr) const {
    return engine->submit(file, true, offset, data, nbytes, std::move(keep), std::move(callback));
  }
};

}  // namespace offload::io
