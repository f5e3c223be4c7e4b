#include "execute/event_log.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "execute/callbacks.h"
#include "execute/serve.h"

namespace tarry {
namespace {

constexpr size_t kCapacity = 1 << 13;
constexpr size_t kMany = kCapacity / 2;

struct Log {
  std::mutex mutex;
  std::vector<LoggedEvent> ring;
  uint64_t written = 0;
  uint64_t taken = 0;
};

Log& event_log() {
  static auto* instance = new Log();
  return *instance;
}

std::atomic<bool> logging{false};

} // namespace

void set_logging(bool on) {
  Log& log = event_log();
  std::lock_guard<std::mutex> guard(log.mutex);
  log.ring.resize(on ? kCapacity : 0);
  log.ring.shrink_to_fit();
  log.taken = log.written;
  logging = on;
}

bool is_logging() {
  return logging.load(std::memory_order_relaxed);
}

void log_event(LoggedEvent event, const char* reason) {
  event.place = current_place();
  event.thread = static_cast<uint64_t>(pthread_self());
  bool many = false;
  {
    Log& log = event_log();
    std::lock_guard<std::mutex> guard(log.mutex);
    if (log.ring.empty()) {
      return;
    }
    event.reason = reason;
    log.ring[log.written++ % kCapacity] = std::move(event);
    many = (log.written - log.taken) % kMany == 0;
  }
  if (many) {
    request_flush();
  }
}

LoggedEvents take_events() {
  Log& log = event_log();
  LoggedEvents found;
  std::lock_guard<std::mutex> guard(log.mutex);
  if (log.ring.empty()) {
    return found;
  }
  if (log.written - log.taken > kCapacity) {
    found.lost = log.written - log.taken - kCapacity;
    log.taken += found.lost;
  }
  for (; log.taken < log.written; ++log.taken) {
    found.events.push_back(log.ring[log.taken % kCapacity]);
  }
  return found;
}

ReadTimer::ReadTimer() : is_on_(is_logging() || has_watcher(Watcher::Subscriber)) {
  if (is_on_) {
    begin_ = Clock::now();
  }
}

void ReadTimer::report(const char* method, int8_t device) {
  const double seconds = seconds_between(begin_, Clock::now());
  if (has_watcher(Watcher::Subscriber)) {
    report_read(method, device, current_place(), seconds);
  } else if (is_logging()) {
    LoggedEvent event{LoggedEvent::Kind::Read, device};
    event.began = event.begin = begin_;
    event.seconds = seconds;
    log_event(event, method);
  }
}

} // namespace tarry
