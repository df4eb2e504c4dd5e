// Work shared among the threads of the session that runs an op.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <type_traits>

#include "abi/ort.h"

namespace onnxtrain {

// A job is cut into parts by its size alone, never by the number of threads or processors. Partial sums are then the same
// numbers on every machine with the same instructions, and a session with one thread does no more work than its job is.
constexpr std::size_t most_parts = 64;

constexpr std::size_t divided_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

class Threads {
 public:
  // Without a session everything runs on the calling thread.
  Threads() = default;
  Threads(const Api& api, const OrtKernelContext* context) : api_(&api), context_(context) {}

  // Calls task(part) for each part in [0, parts), in any order, and returns when all are done.
  template <class Task>
  void run(std::size_t parts, Task&& task) const {
    if (parts <= 1 || context_ == nullptr) {
      for (std::size_t part = 0; part < parts; ++part) task(part);
      return;
    }
    Guarded<std::remove_reference_t<Task>> guarded{task, {}, {}};
    auto each = [](void* user, std::size_t part) { (*static_cast<decltype(guarded)*>(user))(part); };
    OrtStatus* failed = api_->KernelContext_ParallelFor(context_, each, parts, 0, &guarded);
    if (failed != nullptr) {
      api_->ReleaseStatus(failed);
      for (std::size_t part = 0; part < parts; ++part) guarded(part);
    }
    if (guarded.error) std::rethrow_exception(guarded.error);
  }

  // Calls task(begin, end) for at most `most_parts` ranges that together are [0, count), each of `least` elements or more
  // where possible: what is not worth a thread of its own stays on the calling one.
  template <class Task>
  void ranges(std::size_t count, std::size_t least, Task&& task) const {
    if (count == 0) return;
    const std::size_t parts = std::clamp<std::size_t>(count / std::max<std::size_t>(least, 1), 1, most_parts);
    run(parts, [&](std::size_t part) { task(count * part / parts, count * (part + 1) / parts); });
  }

 private:
  // Keeps the first exception of the tasks: none may leave a thread of ONNX Runtime.
  template <class Task>
  struct Guarded {
    Task& task;
    std::atomic<bool> failed;
    std::exception_ptr error;

    void operator()(std::size_t part) {
      try {
        task(part);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  };

  const Api* api_ = nullptr;
  const OrtKernelContext* context_ = nullptr;
};

}  // namespace onnxtrain
