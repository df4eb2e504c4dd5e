#!/bin/sh
# The native kernels on aarch64, on a Debian machine with another processor:
#
#     tests/aarch64/run.sh build                     cross-compiles them,
#     tests/aarch64/run.sh test ARGUMENT ...         and runs pytest with these arguments,
#     tests/aarch64/run.sh wheel FILE ARGUMENT ...   or runs it with the kernels of a wheel, which needs no compiler
#     tests/aarch64/run.sh root                      unpacks Python and the C libraries alone
#
# Python, NumPy, PyTorch and ONNX Runtime are those of aarch64, and run under QEMU's emulation of a Neoverse N1 (NEON
# without SVE). They are Debian's packages and wheels, unpacked below build/aarch64/; nothing of them is installed.
set -eu
cd "$(dirname "$0")/../.."
here=tests/aarch64
out=$PWD/build/aarch64
python=${PYTHON:-python3}

# The newest PyTorch whose wheel for aarch64 is one for the CPU alone.
torch=torch==2.10.0

need() { # COMMAND PACKAGE ...: installs packages of which a command is missing, or says so
  missing=
  while [ $# -gt 0 ]; do
    command -v "$1" >/dev/null || missing="$missing $2"
    shift 2
  done
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    echo "Missing packages; as root: apt-get install --no-install-recommends$missing" >&2
    exit 1
  fi
  apt-get update -q
  # shellcheck disable=SC2086 # a list
  apt-get install -q -y --no-install-recommends $missing
}

# once NAME FILE ... -- COMMAND ...: runs a command, unless it is done and none of the files has changed since.
once() {
  stamp=$out/.$1
  shift
  files=
  while [ "$1" != -- ]; do
    files="$files $1"
    shift
  done
  shift
  # shellcheck disable=SC2086 # a list
  sum=$(cat $files | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then return; fi
  "$@"
  echo "$sum" >"$stamp"
}

build() {
  cmake -S kernels -B "$out/cmake" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
  cmake --build "$out/cmake" --parallel 2
  cmake --install "$out/cmake" --prefix "$out/kernels" >/dev/null
  cp kernels/onnxtrain_kernels/__init__.py "$out/kernels/onnxtrain_kernels/"
}

# Debian's Python for aarch64 and all it depends on: chosen by apt with a state of its own, in which nothing is installed.
unpack_root() {
  rm -rf "$out/apt" "$out/root"
  mkdir -p "$out/apt/state/lists/partial" "$out/apt/cache/archives/partial" "$out/root"
  : >"$out/apt/status"
  cat >"$out/apt/configuration" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$out/apt/state";
Dir::State::status "$out/apt/status";
Dir::Cache "$out/apt/cache";
END
  APT_CONFIG=$out/apt/configuration apt-get update -q
  APT_CONFIG=$out/apt/configuration apt-get install -q -y --no-install-recommends --download-only \
    python3-minimal libpython3-stdlib libstdc++6 musl
  for package in "$out"/apt/cache/archives/*.deb; do dpkg -x "$package" "$out/root"; done
  # ONNX Runtime fails where this is what a processor of another kind says. QEMU takes files of its root before others.
  mkdir "$out/root/proc"
  for processor in $(seq 0 $(($(nproc) - 1))); do
    printf '%s\t: %s\n' processor "$processor" Features 'fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp' \
      'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1
    echo
  done >"$out/root/proc/cpuinfo"
}

once_root() { once root $here/run.sh -- unpack_root; }

unpack_wheels() {
  rm -rf "$out/site"
  version=$(basename "$(readlink "$out/root/usr/bin/python3")")
  set -- --quiet --disable-pip-version-check --no-warn-conflicts --target "$out/site" --only-binary=:all: \
    --python-version "${version#python}" --implementation cp \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64
  "$python" -m pip install "$@" -r $here/requirements.txt
  "$python" -m pip install "$@" --no-deps $torch
}

# Without the test that measures the memory of a second Python: QEMU starts no other program for its processor.
emulated_tests() { # KERNELS ARGUMENT ...
  kernels=$1
  shift
  need qemu-aarch64 qemu-user
  "$python" -m pip --version >/dev/null || need pip3 python3-pip
  once_root
  once wheels $here/run.sh $here/requirements.txt -- unpack_wheels
  QEMU_LD_PREFIX=$out/root QEMU_CPU=${QEMU_CPU:-neoverse-n1} PYTHONPATH=$kernels:$out/site \
    ONNXTRAIN_KERNELS=on qemu-aarch64 "$out/root/usr/bin/python3" -m pytest "$@" \
    --deselect tests/kernels/test_in_place.py::test_a_chain_of_gradients_needs_one_tensor
}

command=${1:-}
mkdir -p "$out"
case $command in
  build | test)
    shift
    need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu cmake cmake make make
    build
    [ "$command" = build ] || emulated_tests "$out/kernels" "$@"
    ;;
  wheel)
    rm -rf "$out/wheel"
    "$python" -m zipfile -e "$2" "$out/wheel"
    shift 2
    emulated_tests "$out/wheel" "$@"
    ;;
  root) once_root ;;
  *) sed -n '2,10s/^# \?//p' "$0" >&2 && exit 2 ;;
esac
