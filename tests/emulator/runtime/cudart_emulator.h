// What the emulator has beyond the CUDA runtime's API.
#pragma once

#include <cstddef>
#include <string>

// Makes memory that others allocated the device's, until the same thread calls emuForget.
extern "C" void emuRegister(void const* p, size_t size);
extern "C" void emuForget();

// Takes what the process has reported since the last call: what went to stderr.
std::string emuReports();
