#!/usr/bin/env bash
# Runs real vLLM with seed 003's configuration file, unchanged, on a real NFS mount in a small virtual machine. An emulated
# processor takes two to three minutes to import vLLM.
# With KVDEPOT_REQUIRE_NFS=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare_nfs
# An emulated processor would take minutes for it.
(cd "$root" && .venv-vllm/bin/python -m tools.vm.nfs_engine --make-model)
on_nfs_mount 4096 1800 ".venv-vllm/bin/python -m tools.vm.nfs_engine tests/data/seeds/003_nfs.yaml"
