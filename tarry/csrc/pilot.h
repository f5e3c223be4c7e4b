// The second thread: it computes what nobody waits for, one task after the other, in the order in which they were handed to it.
//
// It never takes the GIL, so that a thread which holds it may wait for a task. For the same reason it must not be the one that
// frees what Python may have seen: whoever hands over a task keeps it until it is done, and the last reference is never the
// second thread's. It takes a device's lock only to commit a step; nobody waits for a task under that lock.
#pragma once

#include <atomic>
#include <memory>

namespace tarry {

class Task {
 public:
  Task(); // on the thread whose settings it is to run with: number of threads, treatment of denormal numbers
  virtual ~Task() = default;
  void wait(); // until it is done; the second thread has let go of it then
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  void wait_halfway(); // until it is half way, or done: a task may have something to offer before its end

 protected:
  virtual void fly() noexcept = 0;
  void get_halfway(); // by the second thread: what was written before can be read by those who have waited

 private:
  friend class Pilot;
  const int threads_;
  const unsigned float_mode_;
  std::atomic<bool> halfway_{false};
  std::atomic<bool> done_{false};
};

void hand_over(std::shared_ptr<Task> task);
void land_all(); // waits for all tasks: before a fork, whose child would inherit locks that are held in them

} // namespace tarry
