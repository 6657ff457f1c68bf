#!/usr/bin/env bash
# What the records in this folder were made with, on one GPU: results/make.sh [STAGE ...], all stages if none is named.
# What asks for tables does only what is missing; `precision`, whose records were renamed, does all again.
set -euo pipefail
cd "$(dirname "$0")/.."
equipoise=${EQUIPOISE:-equipoise}

bench() { # images a second, as one table
  OMP_NUM_THREADS=8 $equipoise bench --out benchmarks/h200.json
}

tables() { # all cells of the paper's tables on CIFAR-100; the costs of the losses come last, one run at a time
  $equipoise paper table1 table3 table6 table5 confusion separated table4 epsilon batches bounds costs --dataset cifar100
}

comparators() { # what the paper only quotes, each system in the setting of its published numbers
  $equipoise paper comparators --dataset cifar100
}

choice() { # the learning rate of α: another class order, and training images that are set aside
  $equipoise paper choice
}

orders() { # four other orders of the classes
  $equipoise paper orders
}

precision() { # bf16 against fp32, and our kernels against torch's, one by one: three seeds of 25 epochs
  for words in "--engine fused" "--engine eager" "--engine captured --precision fp32"; do
    # Without a store: what is shared would not differ.
    $equipoise sweep il-baseline --remedy balanced --epochs 25 --seed 0,1,2 --store none $words --out "results/precision/${words//[ -]/}"
  done
}

alone() { # where the time of a whole run goes
  run="$equipoise run il-baseline --remedy balanced --dataset cifar100 --steps 5 --store none"
  $run --memory 20 --out results/alone/balanced-250
  $run --memory 10 --out results/alone/balanced-250-10
}

tried() { # what else was tried where a cell was off
  $equipoise run lucir --no-imprint --dataset cifar100 --steps 5 --memory 0 --out results/tried/lucir-no-imprint
}

report() { # from the records: tables, figures and the page, what they say of the paper's claims, and README's tables
  $equipoise report results --out results/report
  $equipoise paper claims --no-run --format markdown > docs/claims.md
  ${PYTHON:-python} results/readme.py
}

for stage in "${@:-bench alone tried tables comparators choice orders precision report}"; do
  for one in $stage; do $one; done
done
