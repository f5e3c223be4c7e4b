// Streams and events.
//
// A device computes what was recorded in the order in which it was recorded, on whichever stream: a stream is a name, with an id of
// its own, and each thread has a current one per device. So to wait for an event, or for another stream, is to do nothing.
// An event stands for all that was recorded on its device before it. Asking whether it is complete launches that, since
// a loop that asks until it is would otherwise never end.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>

namespace tarry {

c10::Stream new_stream(c10::Device device);
c10::Stream current_stream(c10::Device device); // of this thread
c10::Stream exchange_stream(c10::Stream stream);

struct Event {
  using Clock = std::chrono::steady_clock;

  // One that is `timed` computes what it stands for, waits for it, and notes the time: an operator is only recorded where the
  // program calls it, so the time between two lines says nothing of what is between them.
  static Event now(c10::DeviceIndex device, bool timed = false);
  static double milliseconds(const Event& from, const Event& to);
  bool is_complete() const;

  c10::DeviceIndex device;
  uint64_t epoch; // the last one that has anything to compute for it
  Clock::time_point time;
};

} // namespace tarry
