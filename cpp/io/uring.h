// The engine of choice: one thread that owns an io_uring, submits pieces to it and sleeps until some are done.
#pragma once

#include <memory>

#include "io/engine.h"

namespace offload::io {

// Throws Unavailable where the build has no liburing or the kernel refuses a ring.
std::unique_ptr<Engine> make_uring_engine(EngineOptions options);

}  // namespace offload::io
