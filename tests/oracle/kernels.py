"""Compiles CUDA sources for several architectures with NVRTC, which needs neither a GPU nor a toolkit.

    kernels.py FILE.cu...

Kernels over tiles compile for each architecture, whose tensor cores and registers differ. Loops have the same text for all, and
compile for one of them each, in turn.

Exits with 1 where one does not compile, or where it says that something has no text. Where PTX's assembler is installed too, it prints
what a thread of each kernel over tiles takes of registers; one for tensor cores that spills them to memory is a failure as well.
"""

import ctypes
import glob
import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def library():
    folder = os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib")
    for builtins in glob.glob(os.path.join(folder, "libnvrtc-builtins.so*")):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(sorted(glob.glob(os.path.join(folder, "libnvrtc.so*")))[0])


def assembler():
    """PTX's assembler, or nothing."""
    found = glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "bin", "ptxas"))
    return found[0] if found else None


def registers(said):
    """Of each kernel over tiles its registers and the bytes that it spills, by what the assembler says."""
    taken, name = {}, None
    for line in said.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(found[1]) + int(found[2])
        elif (found := re.search(r"Used (\d+) registers", line)) and name.startswith("tiles_"):
            taken[name] = (int(found[1]), spilled)
    return taken


def compiled(nvrtc, source, architecture):
    """The compiler's log, and the PTX for a virtual architecture; for a real one True. Nothing if the source does not compile."""
    program = ctypes.c_void_p()
    if failed := nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        return f"no program: {failed}", None
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-w", b"--fmad=false"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    made = None if failed else True
    if made and architecture.startswith("compute"):
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, ptx)
        made = ptx.value
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), made


def machine_code(nvrtc, ptxas, source, architecture):
    """What keeps a source from becoming machine code, if anything, and the registers of its kernels over tiles where an assembler is
    given: it takes the compiler's second half, and says more."""
    if not ptxas:
        log, made = compiled(nvrtc, source, architecture)
        return None if made else log, {}
    log, ptx = compiled(nvrtc, source, architecture.replace("sm", "compute"))
    if not ptx:
        return log, {}
    command = [ptxas, "-v", f"-arch={architecture}", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True)
    said = done.stderr.decode()
    return None if done.returncode == 0 else said, registers(said)


def for_architecture(head, kernels, architecture):
    """The source of those kernels that compile for an architecture. A name ends with a hash, which draws that of a loop."""
    def is_drawn(name):
        return name.startswith("tiles_") or ARCHITECTURES[int(name.split("_")[-1], 16) % len(ARCHITECTURES)] == architecture

    return head + "".join(text for name, text in kernels.items() if is_drawn(name))


def check(file):
    """Whether all new kernels of a file compile, and what to say of it."""
    path, head, kernels, missing = file
    nvrtc, ptxas = library(), assembler()
    name = os.path.basename(path)
    of = {a: machine_code(nvrtc, ptxas, for_architecture(head, kernels, a), a) for a in ARCHITECTURES}
    bad = [(a, log) for a, (log, _) in of.items() if log is not None]
    if bad or missing:
        return False, [f"FAILED       {name}: {len(kernels)} kernels", *missing, *(f"{a}:\n{log[:2000]}" for a, log in bad)]
    is_good, said = True, [f"ok           {name}: {len(kernels)} new kernels compile for {', '.join(ARCHITECTURES)}"]
    for kernel in of[ARCHITECTURES[0]][1]:
        taken = [of[a][1][kernel] for a in ARCHITECTURES]
        # In single precision, operands come from shared memory element by element, and some bytes more are lost in that.
        signature = kernels[kernel].splitlines()[0]
        is_good &= "f16*" not in signature or not any(spilled for _, spilled in taken)
        words = ", ".join(f"{r} registers" + (f" and spills {s} bytes" if s else "") for r, s in taken)
        said.append(f"             {kernel}: {words}")
    return is_good, said


def with_new_kernels(paths):
    """The path of each file, the text before its kernels, those that no file before it has by their names, and its lines about kernels
    without a text. A kernel's name is a hash of its text."""
    seen = set()
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        head, *kernels = re.split(r'^(?=extern "C" __global__)', text, flags=re.MULTILINE)
        if not kernels:
            sys.exit(f"FAILED       {path}: it has no kernels")
        names = [re.search(r"(\w+)\(", re.sub(r"__launch_bounds__\(\d+\)", "", kernel))[1] for kernel in kernels]
        missing = [line for line in text.splitlines() if line.startswith("// no text")]
        yield path, head, {name: kernel for name, kernel in zip(names, kernels) if name not in seen}, missing
        seen.update(names)


def main():
    if not assembler():
        print("SKIPPED registers: there is no ptxas (PyPI's nvidia-cuda-nvcc)")
    failed = 0
    with multiprocessing.Pool() as pool:
        for is_good, said in pool.imap(check, with_new_kernels(sys.argv[1:])):
            failed |= not is_good
            print(*said, sep="\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
