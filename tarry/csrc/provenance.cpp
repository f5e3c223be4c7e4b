#include <Python.h>

#include "provenance.h"

// Raw interpreter frames: walking them allocates nothing, while PyFrame_GetBack makes a frame object per level.
// Checked on CPython 3.11 and 3.12; later versions take the public, slower way.
#if PY_VERSION_HEX < 0x030D0000
#define TARRY_RAW_FRAMES 1
#define Py_BUILD_CORE 1
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE
#endif

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include <array>
#include <atomic>
#include <vector>

namespace tarry {
namespace {

struct Site {
  PyCodeObject* code; // owned: its address must not be used again
  int instruction; // byte offset in the code
};

struct SiteKey {
  PyCodeObject* code;
  int instruction;
  bool operator==(const SiteKey& other) const { return code == other.code && instruction == other.instruction; }
};

struct SiteKeyHash {
  size_t operator()(const SiteKey& key) const {
    return (reinterpret_cast<size_t>(key.code) >> 4) * 0x9e3779b97f4a7c15ULL + static_cast<size_t>(key.instruction);
  }
};

// Guarded by the GIL.
struct Sites {
  std::vector<Site> sites{Site{nullptr, 0}};
  ska::flat_hash_map<SiteKey, uint32_t, SiteKeyHash> ids;
  ska::flat_hash_map<PyCodeObject*, bool> is_user; // codes are owned
  std::vector<std::string> internal_paths;
};

Sites& sites() {
  static auto* instance = new Sites();
  return *instance;
}

bool is_user_code(PyCodeObject* code) {
  auto& shared = sites();
  auto it = shared.is_user.find(code);
  if (it != shared.is_user.end()) {
    return it->second;
  }
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  bool user = true;
  if (!file) {
    PyErr_Clear();
    user = false;
  } else {
    const std::string name(file);
    user = name.rfind("<frozen", 0) != 0;
    for (const std::string& prefix : shared.internal_paths) {
      user = user && name.rfind(prefix, 0) != 0;
    }
  }
  Py_INCREF(code);
  shared.is_user.emplace(code, user);
  return user;
}

uint32_t intern_site(PyCodeObject* code, int instruction) {
  auto& shared = sites();
  auto [it, inserted] = shared.ids.emplace(SiteKey{code, instruction}, static_cast<uint32_t>(shared.sites.size()));
  if (inserted) {
    Py_INCREF(code);
    shared.sites.push_back({code, instruction});
  }
  return it->second;
}

#ifdef TARRY_RAW_FRAMES
uint32_t python_site() {
  PyThreadState* thread = PyThreadState_GET();
  uint32_t steps = 0;
  for (_PyInterpreterFrame* frame = thread->cframe->current_frame; frame && steps < 200; frame = frame->previous, ++steps) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == FRAME_OWNED_BY_CSTACK) {
      continue;
    }
#endif
    PyCodeObject* code = frame->f_code;
    if (is_user_code(code)) {
      return intern_site(code, _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)));
    }
  }
  return 0;
}
#else
uint32_t python_site() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  uint32_t site = 0;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (is_user_code(code)) {
      site = intern_site(code, PyFrame_GetLasti(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = site ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return site;
}
#endif

// Sites of recent differentiable operators by the sequence number of their autograd node: what backward inherits.
// A lossy ring: a site that was overwritten is merely unknown.
struct ForwardSite {
  std::atomic<uint64_t> sequence{0};
  std::atomic<uint64_t> thread{0};
  std::atomic<uint32_t> site{0};
};
constexpr size_t kRing = 1 << 16;

std::array<ForwardSite, kRing>& forward_sites() {
  static auto* ring = new std::array<ForwardSite, kRing>();
  return *ring;
}

uint32_t backward_site() {
  auto node = torch::autograd::get_current_node();
  if (!node) {
    return 0;
  }
  const uint64_t sequence = node->sequence_nr();
  const ForwardSite& entry = forward_sites()[sequence % kRing];
  const bool matches = entry.sequence.load(std::memory_order_relaxed) == sequence &&
      entry.thread.load(std::memory_order_relaxed) == node->thread_id();
  return matches ? entry.site.load(std::memory_order_relaxed) : 0;
}

} // namespace

uint32_t current_site() {
  if (!PyGILState_Check()) {
    return backward_site();
  }
  const uint32_t site = python_site();
  if (!site) {
    return backward_site();
  }
  if (c10::GradMode::is_enabled()) {
    // Autograd has just made this operator's node, if it has one; its number is the one before the next.
    const uint64_t sequence = at::sequence_number::peek() - 1;
    ForwardSite& entry = forward_sites()[sequence % kRing];
    entry.sequence.store(sequence, std::memory_order_relaxed);
    entry.thread.store(at::RecordFunction::currentThreadId(), std::memory_order_relaxed);
    entry.site.store(site, std::memory_order_relaxed);
  }
  return site;
}

std::pair<std::string, int> site_location(uint32_t site) {
  auto& shared = sites();
  if (site == 0 || site >= shared.sites.size()) {
    return {"", 0};
  }
  const Site& entry = shared.sites[site];
  const char* file = PyUnicode_AsUTF8(entry.code->co_filename);
  if (!file) {
    PyErr_Clear();
  }
  return {file ? file : "", PyCode_Addr2Line(entry.code, entry.instruction)};
}

std::string describe_site(uint32_t site) {
  PyGILState_STATE gil = PyGILState_Ensure();
  auto [file, line] = site_location(site);
  PyGILState_Release(gil);
  return file.empty() ? "an unknown line" : file + ":" + std::to_string(line);
}

void add_internal_path(const std::string& prefix) {
  sites().internal_paths.push_back(prefix);
}

} // namespace tarry
