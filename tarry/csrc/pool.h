// Memory of objects that come and go by the dozen in each step, kept for the next ones: the C library has few chunks of a size at
// hand (glibc: seven), and joins and splits the others.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>

namespace tarry {

// The base of a final class whose objects are allocated like this. Nobody waits for the list of free chunks: who does not get it
// at once goes to the C library. So does a forked child where the thread that had it is gone.
template <class T>
class Pooled {
 public:
  static void* operator new(size_t size) {
    void* memory = nullptr;
    if (!busy_.test_and_set(std::memory_order_acquire)) {
      if (first_) {
        memory = first_;
        first_ = first_->next;
        --count_;
      }
      busy_.clear(std::memory_order_release);
    }
    return memory ? memory : ::operator new(size);
  }

  static void operator delete(void* memory) {
    if (!busy_.test_and_set(std::memory_order_acquire)) {
      const bool kept = count_ < kMost;
      if (kept) {
        first_ = new (memory) Free{first_};
        ++count_;
      }
      busy_.clear(std::memory_order_release);
      if (kept) {
        return;
      }
    }
    ::operator delete(memory);
  }

 private:
  struct Free {
    Free* next;
  };
  static constexpr size_t kMost = 1024;
  static inline std::atomic_flag busy_;
  static inline Free* first_ = nullptr;
  static inline size_t count_ = 0;
};

} // namespace tarry
