// Which torch.nn.Module an operator was called in, by its path from the model: "model.blocks.3.attn".
//
// A module does not know its path. The first time that one is met, Python (modules.py) finds the model that it is part of, and
// names all of its modules here, by their addresses; a module that dies is forgotten before its address can be used again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

typedef struct _object PyObject;

namespace tarry {

// The id of the module's path; 0 if it is no module. The caller's frame keeps `object` alive. It takes the GIL, and may run Python,
// when it meets a module for the first time: call it without holding a lock.
uint32_t module_of(PyObject* object);

// These need the GIL.
std::string module_path(uint32_t module);
void set_module_namer(PyObject* type, PyObject* namer); // torch.nn.Module, and what calls name_modules(); kept for good
void name_modules(const std::vector<std::pair<uint64_t, std::string>>& named); // address, path
void forget_module(uint64_t address);

} // namespace tarry
