// How many threads this process should use.
#pragma once

#include <set>
#include <string>

namespace offload {

// OFFLOAD_THREADS where it is set, else the physical cores of the affinity mask, bounded by the cgroup's CPU quota and
// divided among a job's processes on this machine (LOCAL_WORLD_SIZE).
// At least 1; read once, at first use. Throws std::invalid_argument when OFFLOAD_THREADS is not a positive number.
int default_threads();

// The parts, for tests. `root` is where /sys and /proc are found.
int physical_cores(const std::set<int>& cpus, const std::string& root = "");
// The smallest quota of this process's cgroup and those above it, rounded up; 0 where there is none.
int quota_cpus(const std::string& root = "");

}  // namespace offload
