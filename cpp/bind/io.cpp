// Python's view of engines, swap files, transfers and the pipeline. Every wait lets other Python threads run.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <variant>

#include "io/channel.h"
#include "io/checksum.h"
#include "io/digest.h"
#include "io/faults.h"
#include "io/threads.h"
#include "io/uring.h"
#include "pipeline/pipeline.h"

namespace py = pybind11;

namespace offload {

namespace {

using io::Channel;
using io::Engine;
using io::File;
using io::Transfer;

// Python objects whose transfers are done. I/O threads never take the interpreter's lock: they leave the objects here
// and a Python thread lets go of them, at its next call here or when the interpreter next looks for pending work.
class Graveyard {
 public:
  static Graveyard& get() {
    static auto* const grounds = new Graveyard;  // I/O threads may outlive static destruction
    return *grounds;
  }

  std::shared_ptr<void> keep(py::object object) {
    if (object.is_none()) return nullptr;
    return std::shared_ptr<void>(object.release().ptr(), [](void* kept) { get().bury(static_cast<PyObject*>(kept)); });
  }

  void clear() {
    std::vector<PyObject*> gone;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      gone.swap(objects_);
      scheduled_ = false;
    }
    for (PyObject* object : gone) Py_DECREF(object);
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }

 private:
  Graveyard() {
    ::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
  }

  void bury(PyObject* object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(object);
    if (!open_ || scheduled_) return;
    const auto later = [](void*) {
      get().clear();
      return 0;
    };
    scheduled_ = Py_AddPendingCall(later, nullptr) == 0;
  }

  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  bool scheduled_ = false;
  bool open_ = true;
};

// Calls `reached(limit)` until it is true, letting other threads run and signals (Ctrl-C) through.
template <class F>
void wait_until(F reached) {
  while (true) {
    bool done = false;
    {
      const py::gil_scoped_release release;
      done = reached(std::chrono::milliseconds(100));
    }
    if (done) break;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  Graveyard::get().clear();
}

// Destroying an engine or a pipeline waits for its work.
template <class T>
std::shared_ptr<T> owned(T* raw) {
  return std::shared_ptr<T>(raw, [](T* object) {
    if (PyGILState_Check()) {
      const py::gil_scoped_release release;
      discard(object);
    } else {
      discard(object);
    }
  });
}

io::Faults faults_of(const py::kwargs& kwargs) {
  io::Faults f;
  const std::map<std::string, double*> rates = {{"short_rate", &f.short_rate},
                                                {"interrupt_rate", &f.interrupt_rate},
                                                {"delay_rate", &f.delay_rate},
                                                {"reorder_rate", &f.reorder_rate},
                                                {"read_error_rate", &f.read_error_rate},
                                                {"write_error_rate", &f.write_error_rate},
                                                {"torn_rate", &f.torn_rate},
                                                {"flip_rate", &f.flip_rate}};
  const std::map<std::string, uint64_t*> counts = {
      {"seed", &f.seed}, {"bad_begin", &f.bad_begin}, {"bad_end", &f.bad_end}};
  const std::map<std::string, int*> codes = {{"read_errno", &f.read_errno}, {"write_errno", &f.write_errno}};
  for (const auto& [key, value] : kwargs) {
    const auto name = key.cast<std::string>();
    if (const auto rate = rates.find(name); rate != rates.end()) {
      *rate->second = value.cast<double>();
    } else if (const auto count = counts.find(name); count != counts.end()) {
      *count->second = value.cast<uint64_t>();
    } else if (const auto code = codes.find(name); code != codes.end()) {
      *code->second = value.cast<int>();
    } else if (name == "delay_us_max") {
      f.delay_us_max = value.cast<unsigned>();
    } else {
      throw std::invalid_argument("no fault \"" + name + "\"");
    }
  }
  return f;
}

std::shared_ptr<Engine> make_engine(const std::string& kind, unsigned queue_depth, uint64_t block, double stuck_after,
                                    const py::kwargs& faults) {
  const io::EngineOptions options{queue_depth, block, stuck_after};
  if (kind != "faults" && faults.size() != 0) throw std::invalid_argument("faults are for the engine \"faults\"");
  if (kind == "io_uring") return owned<Engine>(io::make_uring_engine(options).release());
  if (kind == "threads") return owned<Engine>(new io::ThreadEngine(options));
  if (kind != "faults") throw std::invalid_argument("no engine \"" + kind + "\": io_uring, threads or faults");
  return owned<Engine>(new io::FaultEngine(options, faults_of(faults)));
}

py::dict counters_of(const std::vector<std::shared_ptr<Engine>>& engines) {
  io::Counters c;
  for (const auto& engine : engines) c += engine->counters();
  py::dict out;
  out["bytes_read"] = c.bytes_read;
  out["bytes_written"] = c.bytes_written;
  out["bytes_verified"] = c.bytes_verified;
  out["requests"] = c.requests;
  out["pieces"] = c.pieces;
  out["retries"] = c.retries;
  out["in_flight"] = c.in_flight;
  out["in_flight_max"] = c.in_flight_max;
  out["waiting"] = c.waiting;
  out["waiting_max"] = c.waiting_max;
  const std::pair<const char*, const io::Histogram&> sides[] = {{"read", c.read_us}, {"write", c.write_us}};
  for (const auto& [side, us] : sides) {
    const std::string name = std::string(side) + "_latency_us_";
    for (const unsigned percent : {50u, 90u, 99u}) {
      out[py::str(name + "p" + std::to_string(percent))] = us.percentile(percent);
    }
    out[py::str(name + "max")] = us.max();
  }
  return out;
}

io::FaultEngine& faulty(Engine& engine) {
  auto* const faults = dynamic_cast<io::FaultEngine*>(&engine);
  if (faults == nullptr) throw std::invalid_argument("this is for the engine \"faults\"");
  return *faults;
}

std::shared_ptr<Transfer> move(const Channel& channel, bool write, uint64_t offset, uintptr_t address, uint64_t nbytes,
                               py::object keep) {
  Graveyard::get().clear();
  auto kept = Graveyard::get().keep(std::move(keep));
  const py::gil_scoped_release release;
  return channel.engine->submit(channel.file, write, offset, reinterpret_cast<void*>(address), nbytes, std::move(kept));
}

double seconds_of(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// Those that were noted, each as a tuple, and how many gave way.
template <class T, class F>
py::tuple noted(const std::pair<std::vector<T>, uint64_t>& from, F tuple_of) {
  py::list out;
  for (const T& item : from.first) out.append(tuple_of(item));
  return py::make_tuple(out, from.second);
}

void bind_engine(py::module_& m) {
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine",
                                              "Asynchronous file I/O: io_uring, threads, or faults (tests).")
      .def(py::init(&make_engine), py::arg("kind"), py::arg("queue_depth") = 32, py::arg("block") = 1 << 20,
           py::arg("stuck_after") = 60.0)
      .def_property_readonly("kind", &Engine::kind)
      .def_property_readonly("queue_depth", [](const Engine& e) { return e.options().queue_depth; })
      .def_property_readonly("block", [](const Engine& e) { return e.options().block_bytes; })
      .def_property_readonly("stuck_after", [](const Engine& e) { return e.options().stuck_seconds; })
      .def(
          "counters", [](std::shared_ptr<Engine> e) { return counters_of({std::move(e)}); },
          "Bytes, transfers (requests) and their pieces so far; pieces in flight and transfers waiting, now and at "
          "most; "
          "percentiles of a piece's time with the kernel in microseconds, at most an eighth too high.")
      .def_property_readonly("outstanding", &Engine::outstanding, "Transfers that are queued or under way.")
      .def("trace", &Engine::trace, py::arg("most"), "From here on the newest `most` transfers are noted; 0: none.")
      .def(
          "traced",
          [](const Engine& e) {
            return noted(e.traced(), [](const io::Moved& m) {
              return py::make_tuple(m.write, m.nbytes, seconds_of(m.from), seconds_of(m.to));
            });
          },
          "Transfers noted: (write, bytes, begun, ended) in seconds of CLOCK_MONOTONIC, oldest first; and how many "
          "gave "
          "way.")
      .def_static("counters_of", &counters_of, py::arg("engines"), "The counters of several engines together.")
      .def(
          "register",
          [](Engine& e, uintptr_t address, uint64_t nbytes, py::object keep) {
            auto kept = Graveyard::get().keep(std::move(keep));
            const py::gil_scoped_release release;
            return e.register_memory(reinterpret_cast<void*>(address), nbytes, std::move(kept));
          },
          py::arg("address"), py::arg("nbytes"), py::arg("keep"),
          "Tells the kernel about memory that transfers will use; False where that is of no use or not allowed. `keep` "
          "lives till the engine is closed.")
      .def("drain", &Engine::drain, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def("hold", [](Engine& e) { faulty(e).hold(); })
      .def("release", [](Engine& e) { faulty(e).release(); })
      .def(
          "fail", [](Engine& e, int read, int write) { faulty(e).fail(read, write); }, py::arg("read") = 0,
          py::arg("write") = 0, "From here on reads and writes fail with these errnos, where not 0.")
      .def_property_readonly("lies", [](Engine& e) { return faulty(e).lies(); });
}

void bind_file(py::module_& m) {
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer",
                                                  "One submitted move; owns its buffer until it is done.")
      .def(
          "wait", [](Transfer& t) { wait_until([&t](auto limit) { return t.wait_for(limit); }); },
          "Returns when the transfer is done; raises its SwapError, at every call, if it failed.")
      .def_property_readonly("done", &Transfer::done)
      .def_property_readonly("offset", &Transfer::offset)
      .def_property_readonly("nbytes", &Transfer::nbytes);

  py::class_<Channel>(
      m, "File", "A swap file served by an engine. Addresses are integers; `keep` lives till the transfer is done.")
      .def(py::init([](std::shared_ptr<Engine> engine, const std::string& path, uint64_t nbytes, bool direct,
                       bool checksum) {
             const py::gil_scoped_release release;
             return Channel{std::move(engine), std::make_shared<File>(path, nbytes, direct, checksum)};
           }),
           py::arg("engine"), py::arg("path"), py::arg("nbytes"), py::arg("direct") = true, py::arg("checksum") = false)
      .def(
          "read",
          [](const Channel& c, uint64_t offset, uintptr_t address, uint64_t nbytes, py::object keep) {
            return move(c, false, offset, address, nbytes, std::move(keep));
          },
          py::arg("offset"), py::arg("address"), py::arg("nbytes"), py::arg("keep") = py::none())
      .def(
          "write",
          [](const Channel& c, uint64_t offset, uintptr_t address, uint64_t nbytes, py::object keep) {
            return move(c, true, offset, address, nbytes, std::move(keep));
          },
          py::arg("offset"), py::arg("address"), py::arg("nbytes"), py::arg("keep") = py::none())
      .def(
          "grow", [](const Channel& c, uint64_t nbytes) { c.file->grow(nbytes); }, py::arg("nbytes"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "sync", [](const Channel& c) { c.file->sync(); }, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("path", [](const Channel& c) { return c.file->path(); })
      .def_property_readonly("nbytes", [](const Channel& c) { return c.file->size(); })
      .def_property_readonly("checksum", [](const Channel& c) { return c.file->sums() != nullptr; })
      .def_property_readonly("checksum_bytes",
                             [](const Channel& c) { return c.file->sums() ? c.file->sums()->nbytes() : 0; })
      .def_property_readonly("direct", [](const Channel& c) { return c.file->direct(); })
      .def_property_readonly("refusal", [](const Channel& c) { return c.file->direct_refusal(); })
      .def_property_readonly("block_bytes", [](const Channel& c) { return c.file->block_bytes(); })
      .def_property_readonly("memory_align", [](const Channel& c) { return c.file->memory_align(); });
}

using MoveTuple = std::tuple<Channel, uint64_t, uint64_t, uint64_t>;
using PlaceTuple = std::pair<int, uint64_t>;
using SegmentTuple = std::tuple<size_t, uint64_t, PlaceTuple, PlaceTuple, PlaceTuple, PlaceTuple, PlaceTuple>;
// And what other forms have: low, exp_avg_scale, exp_avg_sq_scale, first.
using LongSegmentTuple = std::tuple<size_t, uint64_t, PlaceTuple, PlaceTuple, PlaceTuple, PlaceTuple, PlaceTuple,
                                    PlaceTuple, PlaceTuple, PlaceTuple, uint64_t>;

std::vector<Move> moves_of(const std::vector<MoveTuple>& tuples) {
  std::vector<Move> moves;
  moves.reserve(tuples.size());
  for (const auto& [channel, file_offset, frame_offset, nbytes] : tuples) {
    moves.push_back({channel, file_offset, frame_offset, nbytes});
  }
  return moves;
}

Place place_of(const PlaceTuple& pair) {
  if (pair.first < -1 || pair.first > 1) throw std::invalid_argument("base is 0 (address), 1 (frame) or -1 (absent)");
  return {static_cast<Base>(pair.first), pair.second};
}

template <class T>
T code_of(int code, const char* what) {
  if (code < 0 || code > 2) throw std::invalid_argument(std::string("no ") + what + " " + std::to_string(code));
  return static_cast<T>(code);
}

Segment segment_of(const SegmentTuple& tuple) {
  const auto& [hyper, n, master, grad, exp_avg, exp_avg_sq, out] = tuple;
  return {hyper, n, place_of(master), place_of(grad), place_of(exp_avg), place_of(exp_avg_sq), place_of(out)};
}
Segment segment_of(const LongSegmentTuple& tuple) {
  const auto& [hyper, n, master, grad, exp_avg, exp_avg_sq, out, low, exp_avg_scale, exp_avg_sq_scale, first] = tuple;
  Segment segment = segment_of(SegmentTuple(hyper, n, master, grad, exp_avg, exp_avg_sq, out));
  segment.low = place_of(low);
  segment.exp_avg_scale = place_of(exp_avg_scale);
  segment.exp_avg_sq_scale = place_of(exp_avg_sq_scale);
  segment.first = first;
  return segment;
}

size_t add_job(Pipeline& pipeline, const std::vector<MoveTuple>& reads,
               const std::vector<std::variant<SegmentTuple, LongSegmentTuple>>& segments,
               const std::vector<MoveTuple>& writes, int grad_dtype, int out_dtype, int rule, int master, int moments,
               const std::vector<MoveTuple>& late_reads) {
  Job job;
  job.reads = moves_of(reads);
  for (Move& move : moves_of(late_reads)) {
    move.late = true;
    job.reads.push_back(std::move(move));
  }
  job.writes = moves_of(writes);
  job.segments.reserve(segments.size());
  for (const auto& tuple : segments) {
    job.segments.push_back(std::visit([](const auto& given) { return segment_of(given); }, tuple));
  }
  job.grad_dtype = code_of<Dtype>(grad_dtype, "dtype");
  job.out_dtype = code_of<Dtype>(out_dtype, "dtype");
  job.rule = code_of<Rule>(rule, "rule");
  if (master > 1) throw std::invalid_argument("no master " + std::to_string(master));
  job.master = code_of<Master>(master, "master");
  job.moments = code_of<Moments>(moments, "moments");
  return pipeline.add_job(std::move(job));
}

std::vector<Hyper> hypers_of(const py::buffer& hyper) {
  const py::buffer_info info = hyper.request();
  if (info.itemsize != sizeof(Hyper) || info.ndim != 1 || (info.size > 1 && info.strides[0] != sizeof(Hyper))) {
    throw std::invalid_argument("hyper must be a contiguous 1-D array of 64-byte records (offload.ops.HYPER)");
  }
  std::vector<Hyper> copied(static_cast<size_t>(info.size));
  if (info.size != 0) std::memcpy(copied.data(), info.ptr, copied.size() * sizeof(Hyper));
  return copied;
}

std::shared_ptr<Batch> submit(Pipeline& pipeline, const std::vector<size_t>& jobs, const py::buffer& hyper,
                              bool refresh) {
  auto hypers = hypers_of(hyper);
  const py::gil_scoped_release release;
  return pipeline.submit(jobs, std::move(hypers), refresh);
}

void begin(Pipeline& pipeline, const std::shared_ptr<Batch>& batch, const py::buffer& hyper, bool refresh) {
  auto hypers = hypers_of(hyper);
  const py::gil_scoped_release release;
  pipeline.begin(batch, std::move(hypers), refresh);
}

void gate(Pipeline& pipeline, const std::shared_ptr<Batch>& batch, const py::buffer& hyper) {
  auto hypers = hypers_of(hyper);
  const py::gil_scoped_release release;
  pipeline.gate(batch, std::move(hypers));
}

void settle(Pipeline& pipeline, const std::shared_ptr<Batch>& batch, const py::buffer& hyper) {
  auto hypers = hypers_of(hyper);
  const py::gil_scoped_release release;
  pipeline.settle(batch, std::move(hypers));
}

py::dict stats_of(const Batch& batch) {
  const BatchStats s = batch.stats();
  py::dict out;
  out["read_wait"] = s.read_wait_seconds;
  out["write_wait"] = s.write_wait_seconds;
  out["compute"] = s.compute_seconds;
  out["bytes_read"] = s.bytes_read;
  out["bytes_written"] = s.bytes_written;
  return out;
}

void bind_pipeline(py::module_& m) {
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch", "Jobs submitted together.")
      .def(
          "wait", [](Batch& b) { wait_until([&b](auto limit) { return b.wait_for(limit); }); },
          "Returns when every job is updated and written; raises the first SwapError.")
      .def(
          "wait_job",
          [](Batch& b, size_t index, bool written) {
            wait_until([&](auto limit) { return b.wait_job_for(index, written, limit); });
          },
          py::arg("index"), py::arg("written") = false,
          "Returns when the index-th job is updated (or written too); raises its own SwapError if it cannot be.")
      .def("reached", &Batch::reached, py::arg("index"), py::arg("written") = false,
           "Whether wait_job would return, or raise, at once.")
      .def_property_readonly("done", &Batch::done)
      .def_property_readonly("failed", &Batch::failed, "Whether any job has failed by now.")
      .def("__len__", &Batch::size)
      .def("stats", &stats_of, "Seconds read_wait, write_wait, compute; bytes_read, bytes_written.");

  py::class_<Pipeline, std::shared_ptr<Pipeline>>(m, "Pipeline", "Streams chunks: read, update, write back, at once.")
      .def(py::init([](const std::vector<uintptr_t>& frames, uint64_t frame_bytes, int threads, unsigned group,
                       py::object keep, bool lazy) {
             std::vector<char*> addresses;
             for (const uintptr_t frame : frames) addresses.push_back(reinterpret_cast<char*>(frame));
             return owned(new Pipeline(std::move(addresses), {frame_bytes, threads, group, lazy},
                                       Graveyard::get().keep(std::move(keep))));
           }),
           py::arg("frames"), py::arg("frame_bytes"), py::arg("threads") = 0, py::arg("group") = 0,
           py::arg("keep") = py::none(), py::arg("lazy") = false)
      .def("add_job", &add_job, py::arg("reads"), py::arg("segments"), py::arg("writes"), py::arg("grad_dtype"),
           py::arg("out_dtype"), py::arg("rule") = 0, py::arg("master") = 0, py::arg("moments") = 0,
           py::arg("late_reads") = std::vector<MoveTuple>())
      .def("submit", &submit, py::arg("jobs"), py::arg("hyper"), py::arg("refresh") = false)
      .def("prepare", &Pipeline::prepare, py::arg("jobs"), py::call_guard<py::gil_scoped_release>(),
           "A batch that reads ahead, as far as frames are free, all but `late_reads`; nothing is updated until "
           "begin().")
      .def("begin", &begin, py::arg("batch"), py::arg("hyper"), py::arg("refresh") = false)
      .def("waited", &Pipeline::waited,
           "Seconds that its thread has had nothing to do but wait for reads, and for writes, until now.")
      .def("trace", &Pipeline::trace, py::arg("most"), "From here on the newest `most` jobs are noted; 0: none.")
      .def(
          "traced",
          [](const Pipeline& p) {
            return noted(p.traced(), [](const Traced& t) {
              return py::make_tuple(t.job, seconds_of(t.read_from), seconds_of(t.read_to), seconds_of(t.update_from),
                                    seconds_of(t.update_to), seconds_of(t.write_from), seconds_of(t.write_to));
            });
          },
          "Jobs noted: (number, then when read, update and write began and ended, 0 where there was none), oldest "
          "first; "
          "and how many gave way.")
      .def("cancel", &Pipeline::cancel, py::arg("batch"), py::call_guard<py::gil_scoped_release>(),
           "The prepared batch changes nothing; its wait() returns when it reads no more. Of a gated one what was "
           "opened goes "
           "on.")
      .def("gate", &gate, py::arg("batch"), py::arg("hyper"),
           "As begin(), but each job waits until it is opened, or until settle().")
      .def(
          "open",
          [](Pipeline& p, const std::shared_ptr<Batch>& batch, size_t index, uintptr_t late) {
            p.open(batch, index, reinterpret_cast<char*>(late));
          },
          py::arg("batch"), py::arg("index"), py::arg("late") = 0, py::call_guard<py::gil_scoped_release>(),
          "`late`: the address of what the job's late read would bring, which is then left out; until it is updated.")
      .def("has_frame", &Pipeline::has_frame, py::arg("batch"), py::arg("index"),
           py::call_guard<py::gil_scoped_release>(), "Whether a job that is not over has a frame.")
      .def("settle", &settle, py::arg("batch"), py::arg("hyper"),
           "Opens all jobs of the gated batch that are not open, with these hyper-parameters.");
}

void translate(std::exception_ptr raised) {
  try {
    if (raised) std::rethrow_exception(raised);
  } catch (const io::IoError& error) {
    const py::object type = py::module_::import("offload.errors").attr("SwapError");
    const py::object made = type(error.what());
    // No `filename`: an OSError that has one prints its own text instead of ours.
    if (error.code() != 0) made.attr("errno") = error.code();
    PyErr_SetObject(type.ptr(), made.ptr());
  }
}

void bind_digest(py::module_& m) {
  using io::Digest;
  py::class_<Digest>(m, "Digest")
      .def(py::init<>())
      .def(py::init([](const py::bytes& state) { return Digest::of_state(state); }), py::arg("state"))
      .def(
          "update",
          [](Digest& digest, const py::buffer& data) {
            const py::buffer_info info = data.request();
            if (PyBuffer_IsContiguous(info.view(), 'C') == 0)
              throw py::value_error("a digest takes bytes that lie in a row");
            const py::gil_scoped_release others;
            digest.update(info.ptr, static_cast<size_t>(info.size * info.itemsize));
          },
          py::arg("data"))
      .def("hexdigest", &Digest::hex)
      .def("state", [](const Digest& digest) { return py::bytes(digest.state()); });
}

}  // namespace

void bind_io(py::module_& m) {
  py::register_exception<io::Unavailable>(m, "Unavailable", PyExc_RuntimeError);
  py::register_exception_translator(&translate);
  py::module_::import("atexit").attr("register")(py::cpp_function([] { Graveyard::get().close(); }));
  m.def(
      "checksum",
      [](uintptr_t address, uint64_t nbytes, bool table) {
        const auto* data = reinterpret_cast<const void*>(address);
        return table ? io::checksum_by_table(data, nbytes) : io::checksum(data, nbytes);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("table") = false, py::call_guard<py::gil_scoped_release>());
  m.attr("CHECKSUM_WAY") = io::checksum_way();
  bind_digest(m);
  bind_engine(m);
  bind_file(m);
  bind_pipeline(m);
}

}  // namespace offload
