#include "pilot.h"

#include <ATen/Parallel.h>

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

void rest_a_little() {
#ifdef __SSE__
  _mm_pause();
#endif
}

} // namespace

// Started by the first task. Never destroyed: it may wait when the process ends.
class Pilot {
 public:
  static Pilot& get() {
    static auto* pilot = new Pilot();
    return *pilot;
  }

  void take(std::shared_ptr<Task> task) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!started_) {
        std::thread([this] { work(); }).detach();
        started_ = true;
      }
      waiting_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

  void wait_for(const std::atomic<bool>& sign) {
    for (int i = 0; i < 1000 && !sign.load(std::memory_order_acquire); ++i) { // it often comes soon, and sleeping takes longer
      rest_a_little();
    }
    std::unique_lock<std::mutex> lock(mutex_); // in any case: whoever is in work() has let go of a task that is done then
    landed_.wait(lock, [&sign] { return sign.load(std::memory_order_acquire); });
  }

  void give(std::atomic<bool>& sign) {
    {
      std::lock_guard<std::mutex> guard(mutex_); // or somebody who is about to wait would miss it
      sign.store(true, std::memory_order_release);
    }
    landed_.notify_all();
  }

  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    landed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      std::shared_ptr<Task> task = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      if (at::get_num_threads() != task->threads_) {
        at::set_num_threads(task->threads_);
      }
      set_float_mode(task->float_mode_);
      task->fly();
      lock.lock();
      busy_ = false;
      task->halfway_.store(true, std::memory_order_release);
      task->done_.store(true, std::memory_order_release);
      task.reset();
      landed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, landed_;
  std::deque<std::shared_ptr<Task>> waiting_;
  bool started_ = false;
  bool busy_ = false;
};

Task::Task() : threads_(at::get_num_threads()), float_mode_(float_mode()) {}

void Task::wait() {
  Pilot::get().wait_for(done_);
}

void Task::wait_halfway() {
  Pilot::get().wait_for(halfway_);
}

void Task::get_halfway() {
  Pilot::get().give(halfway_);
}

void hand_over(std::shared_ptr<Task> task) {
  Pilot::get().take(std::move(task));
}

void land_all() {
  Pilot::get().wait_for_all();
}

} // namespace tarry
