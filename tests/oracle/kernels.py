"""Compiles CUDA sources for several architectures with NVRTC, which needs neither a GPU nor a toolkit.

    kernels.py FILE.cu...

Exits with 1 where one does not compile, or where it says that something has no text.
"""

import ctypes
import glob
import os
import sys
import sysconfig

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def library():
    folder = os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib")
    for builtins in glob.glob(os.path.join(folder, "libnvrtc-builtins.so*")):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(sorted(glob.glob(os.path.join(folder, "libnvrtc.so*")))[0])


def compiled(nvrtc, source, architecture):
    """What the compiler says, and whether it made something."""
    program = ctypes.c_void_p()
    if nvrtcCreate := nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        return f"no program: {nvrtcCreate}", False
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-w", b"--fmad=false"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), not failed


def main():
    nvrtc = library()
    failed = 0
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        name, kernels = os.path.basename(path), source.count("__global__")
        missing = [line for line in source.splitlines() if line.startswith("// no text")]
        bad = [(a, log) for a in ARCHITECTURES for log, made in [compiled(nvrtc, source, a)] if not made]
        if bad or missing or kernels == 0:
            failed = 1
            print(f"FAILED       {name}: {kernels} kernels", *missing, *(f"{a}:\n{log[:2000]}" for a, log in bad))
        else:
            print(f"ok           {name}: {kernels} kernels compile for {', '.join(ARCHITECTURES)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
