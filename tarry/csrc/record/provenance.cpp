#include <Python.h>

#include "record/provenance.h"

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
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/gil.h"
#include "record/modules.h"

namespace tarry {
namespace {

struct SiteKey {
  PyCodeObject* code;
  int instruction; // byte offset in the code
  uint32_t module; // see modules.h
  bool operator==(const SiteKey& other) const {
    return code == other.code && instruction == other.instruction && module == other.module;
  }
};

struct SiteKeyHash {
  size_t operator()(const SiteKey& key) const {
    return ((reinterpret_cast<size_t>(key.code) >> 4) + key.module) * 0x9e3779b97f4a7c15ULL + static_cast<size_t>(key.instruction);
  }
};

// Whose code a frame runs. Backward runs on the thread that asked for it: below the engine's entry, frames are the caller's,
// and say nothing about what the engine is doing.
enum class Whose : uint8_t { User, Library, Internal, EngineEntry };

struct Code {
  Whose whose = Whose::User;
  bool is_forward = false; // its first argument may be a torch.nn.Module that is being called
};

// What is known of code objects and sites. The global table is guarded by the GIL; each thread has a copy of what it has
// met, which it reads without the GIL: PyTorch releases it while an operator is dispatched.
struct Sites {
  std::vector<SiteKey> sites{SiteKey{nullptr, 0, 0}};
  ska::flat_hash_map<SiteKey, uint32_t, SiteKeyHash> ids;
  ska::flat_hash_map<PyCodeObject*, Code> codes; // owned: their addresses must not be used again
  PyObject* judge = nullptr;                     // whose a file is
};

struct ThreadSites {
  ska::flat_hash_map<SiteKey, uint32_t, SiteKeyHash> ids;
  ska::flat_hash_map<PyCodeObject*, Code> codes;
  std::array<std::pair<PyCodeObject*, Code>, 256> recent{}; // of `codes`, by address: most frames are found here
};

Sites& sites() {
  static auto* instance = new Sites();
  return *instance;
}

ThreadSites& thread_sites() {
  static thread_local ThreadSites instance;
  return instance;
}

bool is_named(PyCodeObject* code, const char* name) {
  return PyUnicode_CompareWithASCIIString(code->co_name, name) == 0;
}

Whose judge_file(PyObject* file) {
  PyObject* const judge = sites().judge;
  PyObject *type, *value, *traceback; // what is being raised is not ours
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* const answer = judge ? PyObject_CallFunctionObjArgs(judge, file, nullptr) : nullptr;
  const long whose = answer ? PyLong_AsLong(answer) : 0;
  Py_XDECREF(answer);
  PyErr_Restore(type, value, traceback);
  return whose == 1 ? Whose::Library : whose == 2 ? Whose::Internal : Whose::User;
}

Code judge_code(PyCodeObject* code) {
  Gil gil;
  auto& shared = sites();
  auto it = shared.codes.find(code);
  if (it == shared.codes.end()) {
    Code found;
    found.whose = judge_file(code->co_filename);
    if (found.whose == Whose::Internal && is_named(code, "_engine_run_backward")) {
      found.whose = Whose::EngineEntry;
    }
    found.is_forward = code->co_argcount >= 1 && (is_named(code, "forward") || is_named(code, "_call_impl"));
    Py_INCREF(code);
    it = shared.codes.emplace(code, found).first;
  }
  return it->second;
}

Code known_code(PyCodeObject* code, ThreadSites& thread) {
  auto& recent = thread.recent[(reinterpret_cast<size_t>(code) >> 4) % thread.recent.size()];
  if (C10_LIKELY(recent.first == code)) {
    return recent.second;
  }
  auto it = thread.codes.find(code);
  if (it == thread.codes.end()) {
    it = thread.codes.emplace(code, judge_code(code)).first;
  }
  recent = {code, it->second};
  return it->second;
}

uint32_t intern_site(const SiteKey& key) {
  auto& known = thread_sites().ids;
  auto it = known.find(key);
  if (it == known.end()) {
    Gil gil;
    auto& shared = sites();
    auto [entry, inserted] = shared.ids.emplace(key, static_cast<uint32_t>(shared.sites.size()));
    if (inserted) {
      shared.sites.push_back(key); // the code is owned through codes
    }
    it = known.emplace(key, entry->second).first;
  }
  return it->second;
}

// How far from the operator's line its module is looked for: a function that a module calls, and what that calls. Code that is in
// no module, such as an optimizer in a framework's loop, would have all of its callers looked at for each operator.
constexpr int kBeyond = 8;

// What the frames of a thread say: where the operator is called, where the user's own code is, and in which module.
struct Found {
  SiteKey site{nullptr, 0, 0};
  SiteKey user{nullptr, 0, 0};
  bool in_engine = false; // of autograd, which the frames below called
  int beyond = 0;         // frames that were looked at only for the module
  ThreadSites& thread = thread_sites();

  // Looks at a frame, from the inside out; true if all is known that is wanted. `first()` gives its first argument, or null.
  template <typename Instruction, typename First>
  bool look(PyCodeObject* code, bool wants_user, const Instruction& instruction, const First& first) {
    const Code known = known_code(code, thread);
    if (known.whose == Whose::EngineEntry) {
      in_engine = true;
      return !wants_user;
    }
    if (!in_engine) {
      if (known.is_forward && !site.module) {
        PyObject* const object = first();
        site.module = object ? module_of(object) : 0;
      }
      if (!site.code && known.whose != Whose::Internal) {
        site.code = code;
        site.instruction = instruction();
      }
    }
    if (wants_user && !user.code && known.whose == Whose::User) {
      user.code = code;
      user.instruction = instruction();
    }
    const bool is_located = in_engine || (site.code && (site.module || ++beyond > kBeyond));
    return is_located && (user.code || !wants_user);
  }
};

constexpr int kDeepest = 200; // frames that are looked at

#ifdef TARRY_RAW_FRAMES
_PyInterpreterFrame* innermost_frame() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  return thread && thread->cframe ? thread->cframe->current_frame : nullptr;
}

bool is_python(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->owner != FRAME_OWNED_BY_CSTACK;
#else
  return true;
#endif
}

PyObject* contents(PyObject* variable) {
  return variable && PyCell_Check(variable) ? PyCell_GET(variable) : variable; // one that an inner function uses
}

// The frames of this thread stand still while it is in here, with or without the GIL.
Found look_at_frames(bool wants_user) {
  Found found;
  int depth = 0;
  for (_PyInterpreterFrame* frame = innermost_frame(); frame && depth < kDeepest; frame = frame->previous, ++depth) {
    const bool done = is_python(frame) &&
        found.look(
            frame->f_code, wants_user, [&] { return _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)); },
            [&] { return contents(frame->localsplus[0]); });
    if (done) {
      break;
    }
  }
  return found;
}
#else
Found look_at_frames(bool wants_user) {
  Found found;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread) {
    return found;
  }
  Gil gil;
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  for (int depth = 0; frame && depth < kDeepest; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    PyObject* first = nullptr;
    const bool done = found.look(
        code, wants_user, [&] { return PyFrame_GetLasti(frame); },
        [&] {
          first = PyFrame_GetVarString(frame, "self");
          PyErr_Clear();
          return first;
        });
    Py_XDECREF(first); // the frame has it, too
    Py_DECREF(code);
    PyFrameObject* back = done ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return found;
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

// All zeros at the start, so that it takes no memory but what is used of it.
std::array<ForwardSite, kRing> forward_sites;

uint32_t backward_site() {
  auto node = torch::autograd::get_current_node();
  if (!node) {
    return 0;
  }
  const uint64_t sequence = node->sequence_nr();
  const ForwardSite& entry = forward_sites[sequence % kRing];
  const bool matches = entry.sequence.load(std::memory_order_relaxed) == sequence &&
      entry.thread.load(std::memory_order_relaxed) == node->thread_id();
  return matches ? entry.site.load(std::memory_order_relaxed) : 0;
}

uint32_t site_of(Found& found) {
  if (!found.site.code) {
    return backward_site();
  }
  if (found.in_engine && !found.site.module) { // a backward function in Python: it has its forward's module
    if (const uint32_t forward = backward_site()) {
      Gil gil;
      found.site.module = sites().sites[forward].module;
    }
  }
  return intern_site(found.site);
}

} // namespace

uint32_t current_site() {
  Found found = look_at_frames(/*wants_user=*/false);
  const uint32_t site = site_of(found);
  if (found.site.code && c10::GradMode::is_enabled()) {
    // Autograd has just made this operator's node, if it has one; its number is the one before the next.
    const uint64_t sequence = at::sequence_number::peek() - 1;
    ForwardSite& entry = forward_sites[sequence % kRing];
    entry.sequence.store(sequence, std::memory_order_relaxed);
    entry.thread.store(at::RecordFunction::currentThreadId(), std::memory_order_relaxed);
    entry.site.store(site, std::memory_order_relaxed);
  }
  return site;
}

Place current_place() {
  Found found = look_at_frames(/*wants_user=*/true);
  const uint32_t site = site_of(found);
  return {site, found.user.code ? intern_site(found.user) : 0};
}

std::pair<std::string, int> site_location(uint32_t site) {
  auto& shared = sites();
  if (site == 0 || site >= shared.sites.size()) {
    return {"", 0};
  }
  const SiteKey& entry = shared.sites[site];
  const char* file = PyUnicode_AsUTF8(entry.code->co_filename);
  if (!file) {
    PyErr_Clear();
  }
  return {file ? file : "", PyCode_Addr2Line(entry.code, entry.instruction)};
}

std::string site_module(uint32_t site) {
  auto& shared = sites();
  return site < shared.sites.size() ? module_path(shared.sites[site].module) : "";
}

uint32_t site_without_module(uint32_t site) {
  const SiteKey& key = sites().sites[site];
  return key.module ? intern_site({key.code, key.instruction, 0}) : site;
}

PlaceText describe_place(const Place& place) {
  PlaceText text;
  const auto& known = sites().sites;
  // A program that is installed itself has no code but a library's.
  const bool is_users = place.site && (!place.user || known_code(known[place.site].code, thread_sites()).whose == Whose::User);
  std::tie(text.file, text.line) = site_location(is_users ? place.site : place.user);
  if (place.site && !is_users) {
    const auto [file, line] = site_location(place.site);
    text.library = file + ":" + std::to_string(line);
  }
  text.module = site_module(place.site);
  return text;
}

std::string describe_site(uint32_t site) {
  Gil gil;
  auto [file, line] = site_location(site);
  const std::string module = site_module(site);
  return file.empty() ? "an unknown line" : file + ":" + std::to_string(line) + (module.empty() ? "" : " in " + module);
}

void set_file_judge(PyObject* judge) {
  Py_INCREF(judge);
  sites().judge = judge;
}

#ifdef TARRY_RAW_FRAMES
PyObject* frame_variables(PyObject* type) {
  PyObject* const frames = PyList_New(0);
  int depth = 0;
  for (_PyInterpreterFrame* frame = innermost_frame(); frame && depth < kDeepest; frame = frame->previous, ++depth) {
    if (!is_python(frame)) {
      continue;
    }
    PyCodeObject* const code = frame->f_code;
    PyObject* const variables = PyDict_New();
    for (Py_ssize_t i = 0; i < code->co_nlocalsplus; ++i) {
      PyObject* const object = contents(frame->localsplus[i]);
      PyObject* const name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
      const bool is_self = i == 0 && code->co_argcount > 0;
      if (object && (is_self || PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(type)))) {
        PyDict_SetItem(variables, name, object);
      }
    }
    PyObject* const row = Py_BuildValue("(ONO)", code, variables, frame->f_globals);
    PyList_Append(frames, row);
    Py_DECREF(row);
  }
  return frames;
}
#else
PyObject* frame_variables(PyObject*) { // from 3.13 on, looking at f_locals keeps nothing alive
  Py_RETURN_NONE;
}
#endif

// ---- modules
namespace {

// Guarded by the GIL. Each thread has a copy of what it has met, which it reads without the GIL.
struct Modules {
  PyTypeObject* type = nullptr;
  PyObject* namer = nullptr;
  std::vector<std::string> paths{""};
  std::unordered_map<std::string, uint32_t> ids{{"", 0}};
  ska::flat_hash_map<PyObject*, uint32_t> named;
};

struct ThreadModules {
  uint64_t version = 0;
  ska::flat_hash_map<PyObject*, uint32_t> named;
  ska::flat_hash_map<PyTypeObject*, bool> others; // classes that are no modules; owned: their addresses must not be used again
};

std::atomic<uint64_t> version{1}; // grows when a module dies: its address may be used again

Modules& modules() {
  static auto* instance = new Modules();
  return *instance;
}

ThreadModules& thread_modules() {
  static thread_local ThreadModules instance;
  return instance;
}

// An error of ours must not become the program's, nor an interrupt be lost.
void drop_error() {
  const bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  PyErr_Clear();
  if (interrupted) {
    PyErr_SetInterrupt();
  }
}

uint32_t meet(PyObject* object, ThreadModules& known) {
  Gil gil;
  Modules& shared = modules();
  if (!shared.type || !PyType_IsSubtype(Py_TYPE(object), shared.type)) {
    Py_INCREF(Py_TYPE(object));
    known.others.emplace(Py_TYPE(object), true);
    return 0;
  }
  auto found = shared.named.find(object);
  if (found == shared.named.end()) {
    PyObject *type, *value, *traceback; // what is being raised is not ours
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* const result = PyObject_CallFunctionObjArgs(shared.namer, object, nullptr);
    if (!result) {
      drop_error();
    }
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback);
    found = shared.named.find(object);
    if (found == shared.named.end()) {
      return 0;
    }
  }
  known.named[object] = found->second;
  return found->second;
}

} // namespace

uint32_t module_of(PyObject* object) {
  ThreadModules& known = thread_modules();
  const uint64_t now = version.load(std::memory_order_acquire);
  if (known.version != now) {
    known.named.clear();
    known.version = now;
  }
  const auto found = known.named.find(object);
  if (found != known.named.end()) {
    return found->second;
  }
  return known.others.count(Py_TYPE(object)) ? 0 : meet(object, known);
}

std::string module_path(uint32_t module) {
  return modules().paths[module];
}

void set_module_namer(PyObject* type, PyObject* namer) {
  Py_INCREF(type);
  Py_INCREF(namer);
  modules().type = reinterpret_cast<PyTypeObject*>(type);
  modules().namer = namer;
}

void name_modules(const std::vector<std::pair<uint64_t, std::string>>& named) {
  Modules& shared = modules();
  for (const auto& [address, path] : named) {
    const auto [entry, inserted] = shared.ids.emplace(path, static_cast<uint32_t>(shared.paths.size()));
    if (inserted) {
      shared.paths.push_back(path);
    }
    shared.named[reinterpret_cast<PyObject*>(address)] = entry->second;
  }
}

void forget_module(uint64_t address) {
  modules().named.erase(reinterpret_cast<PyObject*>(address));
  version.fetch_add(1, std::memory_order_release);
}

} // namespace tarry
