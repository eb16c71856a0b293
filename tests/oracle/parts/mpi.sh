# The needs of the parts mpi and hosts: $with_mpi are options of cargo test.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if ! command -v mpicc > /dev/null || ! command -v mpirun > /dev/null; then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin; } > /dev/null 2>&1 ||
        skip "there is no MPI, and apt cannot install libopenmpi-dev and openmpi-bin"
fi
# Finding libclang is the build's affair where it is installed or named.
if [ -z "${LIBCLANG_PATH:-}" ] && ! compgen -G '/usr/lib/llvm-*/lib/libclang.so*' > /dev/null && ! compgen -G '/usr/lib/*/libclang-[0-9]*.so*' > /dev/null; then
    environment "$target/libclang-venv" clang libclang || skip "there is no libclang, and PyPI has none either"
    LIBCLANG_PATH="$(realpath "$target/libclang-venv"/lib/python3*/site-packages/clang/native)"
    BINDGEN_EXTRA_CLANG_ARGS="-I$(gcc -print-file-name=include)"
    export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
fi
# The whole workspace, as in other builds: dependencies of one crate alone have other features and are built again.
with_mpi=(--quiet --workspace --features altiplano/mpi)
