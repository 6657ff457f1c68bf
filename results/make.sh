#!/usr/bin/env bash
# What the records in this folder were made with, on one GPU. Every command goes on where it was stopped, and a second
# call does only what is missing. Usage: results/make.sh FOLDER [STAGE ...], all stages if none is named.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
equipoise=${EQUIPOISE:-equipoise}

bench() { # images a second, as one table
  $equipoise bench --out "$out/bench.json"
}

alone() { # seconds and memory of a whole run that has the GPU to itself and reuses nothing; then of three losses
  $equipoise run il-baseline --loss balanced --store none --out "$out/alone/balanced"
  for loss in standard balanced meta; do
    $equipoise run il-baseline --loss $loss --epochs 25 --store none --out "$out/alone/$loss-25"
  done
}

choice() { # the learning rate of α: another class order, and training images that are set aside
  $equipoise sweep il-baseline --loss meta --alpha-lr 1,3,10,30 --order 0 --validation 0.1 --out "$out/choice"
}

cells() { # the tables; Meta with the rate that `choice` found best
  local best
  best=$(python3 - "$out/choice" <<'PY'
import json, pathlib, sys
found = [json.loads(p.read_text()) for p in pathlib.Path(sys.argv[1]).glob("*/result.json")]
print(max(found, key=lambda r: r["average_incremental_accuracy"])["run"]["alpha_lr"])
PY
)
  { echo "il-baseline --loss meta --alpha-lr $best"; cat "$here/cifar100.txt"; } > "$out/cells.txt"
  $equipoise sweep --runs "$out/cells.txt" --out "$out/cifar100" "$@"
}

precision() { # bf16 against fp32, and our kernels against torch's, kernel by kernel: three seeds of 25 epochs
  for words in "--engine fused" "--engine eager" "--engine captured --precision fp32"; do
    # Without a store: what is shared would not differ.
    $equipoise sweep il-baseline --loss balanced --epochs 25 --seed 0,1,2 --store none $words --out "$out/precision/${words//[ -]/}"
  done
}

mkdir -p "$out"
for stage in "${@:-bench alone choice cells precision}"; do
  for one in $stage; do $one; done
done
