#include "execute/worker.h"

#include <ATen/Parallel.h>
#include <sched.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace tarry {
namespace {

// Whether denormal numbers are flushed to zero (torch.set_flush_denormal) belongs to a thread.
unsigned float_mode() {
#ifdef __SSE__
  return _mm_getcsr();
#else
  return 0;
#endif
}

void set_float_mode([[maybe_unused]] unsigned mode) {
#ifdef __SSE__
  _mm_setcsr(mode);
#endif
}

void pause_briefly() {
#ifdef __SSE__
  _mm_pause();
#endif
}

} // namespace

// Never destroyed: the thread may be waiting when the process ends.
class Worker {
 public:
  static Worker& get() {
    static auto* worker = new Worker();
    return *worker;
  }

  void submit(std::shared_ptr<Task> task) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!started_) {
        std::thread([this] { work(); }).detach();
        started_ = true;
      }
      queue_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

  void wait_for(const Task& task, Task::Progress until) {
    const auto reached = [&] { return task.progress_.load(std::memory_order_acquire) >= until; };
    for (int i = 0; i < 1000 && !reached(); ++i) { // most tasks end soon, and sleeping takes longer
      pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex_); // in any case: work() has let go of a task that is done then
    progress_.wait(lock, reached);
  }

  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  void report(Task& task, Task::Progress progress) {
    {
      std::lock_guard<std::mutex> guard(mutex_); // a thread that is about to wait would miss it otherwise
      task.progress_.store(progress, std::memory_order_release);
    }
    progress_.notify_all();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !queue_.empty(); });
      std::shared_ptr<Task> task = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      if (at::get_num_threads() != task->threads_) {
        at::set_num_threads(task->threads_);
      }
      set_float_mode(task->float_mode_);
      task->run();
      lock.lock();
      busy_ = false;
      task->progress_.store(Task::Progress::Done, std::memory_order_release);
      task.reset();
      progress_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<std::shared_ptr<Task>> queue_;
  bool started_ = false;
  bool busy_ = false;
};

Task::Task() : threads_(at::get_num_threads()), float_mode_(float_mode()) {}

void Task::wait(Progress until) const {
  Worker::get().wait_for(*this, until);
}

void Task::publish() {
  Worker::get().report(*this, Progress::EarlyDone);
}

void submit(std::shared_ptr<Task> task) {
  Worker::get().submit(std::move(task));
}

void wait_for_all_tasks() {
  Worker::get().wait_for_all();
}

bool may_use_second_thread(int threads, int cores, c10::Device device) {
  return !device.is_cpu() || threads == 1 || threads < cores - 1;
}

int available_cores() {
  cpu_set_t mask;
  const bool known = sched_getaffinity(0, sizeof(mask), &mask) == 0; // fails where there are more than 1024
  return known ? CPU_COUNT(&mask) : static_cast<int>(std::thread::hardware_concurrency());
}

} // namespace tarry
