// The worker: one thread that runs tasks one after the other, in the order in which they were submitted.
//
// The worker never takes the GIL, so a thread that holds the GIL may wait for a task. For the same reason the worker must not free
// what Python may have seen: the submitter keeps a task until it is done, and the worker never holds the last reference. The worker
// takes a device's lock only to commit a step; no thread waits for a task under that lock.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <memory>

namespace tarry {

class Task {
 public:
  enum class Progress : uint8_t {
    Submitted, // waiting, or running
    EarlyDone, // what the task has published can be read; only AsyncStep publishes something before its end
    Done,      // the worker holds no reference any more
  };

  Task(); // on the thread whose settings the task runs with: number of threads, treatment of denormal numbers
  virtual ~Task() = default;
  void wait(Progress until = Progress::Done) const;
  bool is_done() const { return progress_.load(std::memory_order_acquire) == Progress::Done; }

 protected:
  virtual void run() noexcept = 0;
  void publish(); // by the worker: EarlyDone

 private:
  friend class Worker;
  const int threads_;
  const unsigned float_mode_;
  std::atomic<Progress> progress_{Progress::Submitted};
};

void submit(std::shared_ptr<Task> task);
void wait_for_all_tasks(); // before a fork: the child would inherit locks that the worker holds

// Whether the worker can run kernels on `device` while another thread goes on. On a CPU, two threads that each run kernels have a
// team of threads each, and the teams fight for the cores unless there is room for the worker's team beside the other thread.
bool may_use_second_thread(int threads, int cores, c10::Device device);
int available_cores(); // to this process, by its affinity mask

} // namespace tarry
