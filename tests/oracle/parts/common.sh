# Functions that the parts share. Each part sources this file first: it stands in the root of the repository, has a folder $scratch of its own,
# the built $altiplano and $evaluate, and exits with $failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

part="$(basename "$0")"
target="${CARGO_TARGET_DIR:-target}"
# `tests/oracle/run` makes them; a part that runs by itself takes those of the last build of the tests.
altiplano="${ALTIPLANO_BUILT:-$target/debug}/altiplano"
evaluate="${ALTIPLANO_BUILT:-$target/debug/examples}/evaluate"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
export JAX_PLATFORMS=cpu
failed=0

ok() { echo "ok           $*"; }
failed() {
    echo "FAILED       $*"
    failed=1
}
skipped() { echo "SKIPPED tests/oracle $part: $*"; }
skip() {
    skipped "$@"
    exit "$failed"
}

# environment FOLDER "MODULE, ..." PACKAGE...: makes a virtual environment that imports the modules, unless there is one. Parts that
# run side by side wait for each other.
environment() {
    local folder="$1" modules="$2"
    command -v python3 > /dev/null || skip "there is no python3"
    {
        flock 9
        [ -x "$folder/bin/python" ] || python3 -m venv "$folder" || skip "python3 cannot make a virtual environment"
        "$folder/bin/python" -c "import $modules" 2> /dev/null || "$folder/bin/python" -m pip install --quiet --no-compile "${@:3}" || true
        "$folder/bin/python" -c "import $modules" 2> /dev/null
    } 9> "$folder.lock"
}

# Sets $jax to a Python that has JAX.
with_jax() {
    local folder="${ALTIPLANO_ORACLE_VENV:-$target/oracle-venv}"
    environment "$folder" "flax, jax, numpy, optax, safetensors" flax jax numpy optax safetensors || skip "jax cannot be installed from PyPI"
    jax="$folder/bin/python"
}

# As with_jax, with NVIDIA's compiler and JAX's plugin for its GPUs, which compile without a driver, where they can be had.
with_jax_for_gpus() {
    with_jax
    local version
    version="$("$jax" -c 'import jax; print(jax.__version__)')"
    environment "$(dirname "$(dirname "$jax")")" "nvidia.cuda_nvcc, jax_plugins.xla_cuda12" \
        --no-deps "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" nvidia-cuda-nvcc-cu12 || true
}

# Sets $torch to a Python that has PyTorch; "MODULE, ..." and PACKAGE... are further ones.
with_torch() {
    local folder="${ALTIPLANO_TORCH_VENV:-$target/torch-venv}"
    environment "$folder" "numpy, safetensors, torch${1:+, $1}" numpy safetensors torch "${@:2}"
    torch="$folder/bin/python"
}

# Sets $cuda to an environment with NVIDIA's runtime compiler.
with_nvrtc() {
    cuda="${ALTIPLANO_CUDA_VENV:-$target/cuda-venv}"
    environment "$cuda" nvidia nvidia-cuda-nvrtc==13.0.88 || skip "the wheel nvidia-cuda-nvrtc cannot be installed from PyPI"
    # PTX's assembler says how many registers kernels take; nothing else needs it.
    "$cuda/bin/python" -m pip install --quiet nvidia-cuda-nvcc==13.0.88 || true
}

# Sets $plugin to XLA's PJRT plugin for CPUs, or to another that ALTIPLANO_PJRT_PLUGIN names.
with_xla() {
    plugin="${ALTIPLANO_PJRT_PLUGIN:-}"
    [ -z "$plugin" ] || return 0
    environment "$target/xla-venv" xla_plugins --no-deps xla-cpu-pjrt==0.0.1 || skip "xla-cpu-pjrt cannot be installed from PyPI"
    plugin="$(echo "$target"/xla-venv/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so)"
}

# Sets $emulated to a folder with the libraries of an emulated GPU; empty without a compiler.
with_emulated_gpu() {
    emulated=""
    command -v g++ > /dev/null || { skipped "no emulated GPU: there is no g++"; return; }
    emulated="$scratch/emulated"
    mkdir "$emulated"
    g++ -w -std=c++17 -O1 -shared -fPIC -o "$emulated/libcuda.so.1" runtime/tests/cuda/emulated.cpp
    for library in libnvrtc.so.13 libcublasLt.so.13 libnccl.so.2; do ln -s libcuda.so.1 "$emulated/$library"; done
}

# agrees MODEL NAME OPTION...: trains one step of a model under a plan, given as options, and compares with what was recorded.
agrees() {
    local model="$1" name="$2" said
    shift 2
    if said="$("$altiplano" verify "$model" --expect "${model%.*}.safetensors" "$@" 2>&1)"; then
        ok "$name $*"
    else
        failed "$name $*"
        echo "$said"
    fi
}

# evaluated FOLDER [OPTION...]: compares recorded values with those of the interpreter and the kernels. What agrees is counted, not listed.
evaluated() {
    "$evaluate" "${@:2}" "$1" > "$1.log" || failed=1
    grep -v '^ok ' "$1.log" || true
}
