// When to stop trying something that costs time if it fails.
#pragma once

#include <atomic>

namespace tarry {

// After kPatience failures in a row, the next kPause attempts are left out; then one more failure is enough.
class Backoff {
 public:
  bool allows() { // an attempt
    if (pause_ > 0) {
      --pause_;
      return false;
    }
    return true;
  }
  void succeeded() { failures_ = 0; }
  void failed() {
    if (++failures_ >= kPatience) {
      pause_ = kPause;
    }
  }
  void reset() { failures_ = pause_ = 0; }

 private:
  static constexpr int kPatience = 2;
  static constexpr int kPause = 16;
  std::atomic<int> failures_{0};
  std::atomic<int> pause_{0};
};

} // namespace tarry
