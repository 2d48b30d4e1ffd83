#include "simd/topology.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace offload {
namespace {

constexpr int kThreadsMax = 4096;

std::set<int> affinity() {
  std::set<int> cpus;
  for (int count = 1024; count <= 1 << 20; count *= 2) {  // the kernel refuses masks smaller than its own
    cpu_set_t* mask = CPU_ALLOC(count);
    const std::size_t size = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(size, mask);
    const bool got = sched_getaffinity(0, size, mask) == 0;
    for (int cpu = 0; got && cpu < count; ++cpu)
      if (CPU_ISSET_S(cpu, size, mask)) cpus.insert(cpu);
    CPU_FREE(mask);
    if (got) break;
  }
  return cpus;
}

double ratio(const std::string& quota, const std::string& period) {
  char* end = nullptr;
  const double q = std::strtod(quota.c_str(), &end);
  if (end == quota.c_str() || q <= 0) return 0;  // "max", "-1" or nothing
  const double p = std::strtod(period.c_str(), nullptr);
  return p > 0 ? q / p : 0;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// One cgroup directory's quota in CPUs; 0 where there is none.
double quota_at(const std::string& directory) {
  std::istringstream v2(first_line(directory + "/cpu.max"));
  std::string quota, period;
  if (v2 >> quota >> period) return ratio(quota, period);
  return ratio(first_line(directory + "/cpu.cfs_quota_us"), first_line(directory + "/cpu.cfs_period_us"));
}

// The directories of this process's cgroup, as the unified or the cpu hierarchy mounts it.
std::vector<std::pair<std::string, std::string>> cgroups(const std::string& root) {
  std::vector<std::pair<std::string, std::string>> found;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") found.emplace_back(root + "/sys/fs/cgroup", path);
    if (controllers.find(",cpu,") != std::string::npos) {
      found.emplace_back(root + "/sys/fs/cgroup/cpu,cpuacct", path);
      found.emplace_back(root + "/sys/fs/cgroup/cpu", path);
    }
  }
  return found;
}

int asked_threads(const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end || value < 1 || value > kThreadsMax)
    throw std::invalid_argument("OFFLOAD_THREADS is \"" + std::string(text) + "\": give a number from 1 to " +
                                std::to_string(kThreadsMax));
  return static_cast<int>(value);
}

// Processes of one job on this machine, as torchrun says.
int local_ranks() {
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  return text ? static_cast<int>(std::clamp(std::strtol(text, nullptr, 10), 1L, long{kThreadsMax})) : 1;
}

}  // namespace

int physical_cores(const std::set<int>& cpus, const std::string& root) {
  std::set<std::string> cores;
  for (int cpu : cpus) {
    const std::string topology = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::string package = first_line(topology + "physical_package_id");
    const std::string cluster = first_line(topology + "cluster_id");  // on ARM each may count its cores anew
    const std::string core = first_line(topology + "core_id");
    cores.insert(core.empty() ? "cpu " + std::to_string(cpu) : package + " " + cluster + " " + core);
  }
  return std::max(1, static_cast<int>(cores.size()));
}

int quota_cpus(const std::string& root) {
  double least = 0;
  for (const auto& [mount, path] : cgroups(root)) {
    for (std::string at = path;; at = at.substr(0, at.rfind('/'))) {
      const double quota = quota_at(mount + (at == "/" ? "" : at));
      if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
      if (at.empty() || at.find('/') == std::string::npos) break;
    }
  }
  return static_cast<int>(std::ceil(least));
}

int default_threads() {
  static const int threads = [] {
    const char* asked = std::getenv("OFFLOAD_THREADS");
    if (asked && *asked) return asked_threads(asked);
    const int cores = physical_cores(affinity());
    const int quota = quota_cpus();
    return std::max(1, (quota > 0 ? std::min(cores, quota) : cores) / local_ranks());
  }();
  return threads;
}

}  // namespace offload
