#!/usr/bin/env bash
# Runs checks that need GPUs, each under a time limit, from the folder that `cargo xtask gpu-kit FOLDER` makes: no cargo needed.
#
#   gpu-checks.sh [-n] [-o LOGS] [-b SECONDS] GROUP|GROUP/CHECK ...
#     -n  only shows the commands            -o  folder of logs (default: ./gpu-logs)
#     -b  no check starts later than this    groups: see docs/gpu-checks.md, or -n all
#
# Ends with one line for each check and a total; the exit status is that of the total. A check that skips everything fails.
# NCCL_LIBRARIES: paths of libnccl.so.2, for the groups nccl and gin. TRACE: a file of recorded routing, for run.
set -uo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=gpu-logs budget=86400 show=
while getopts no:b: option; do
    case $option in n) show=1 ;; o) logs=$OPTARG ;; b) budget=$OPTARG ;; *) sed -n 2,10p "$0"; exit 2 ;; esac
done
shift $((OPTIND - 1))
[[ $# -gt 0 ]] || { sed -n 2,10p "$0"; exit 2; }
wanted=("$@")
if [[ ! $show ]]; then
    names=" $(bash "${BASH_SOURCE[0]}" -n all | sed 's/ .*//' | tr '\n' ' ')"
    for one in "${wanted[@]}"; do
        [[ $one == all || $names == *" $one "* || $names == *" $one/"* ]] || { echo "nothing is named $one"; exit 2; }
    done
    mkdir -p "$logs"
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# Multicast stays off unless somebody who may use it says so.
export CUDA_VMM_DISABLE_MULTICAST=${CUDA_VMM_DISABLE_MULTICAST:-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export CUDA_DEVICE_MAX_CONNECTIONS=32 GIN_SOFT_LIBRARY=${GIN_SOFT_LIBRARY:-$kit/lib/libnccl_gin_soft.so}
read -ra nccls <<<"${NCCL_LIBRARIES:-libnccl.so.2}"
lines=() bad=0 good=0 group=

# check NAME LIMIT [VARIABLE=VALUE ...] EXECUTABLE [ARGUMENT ...]; with needs=N before it, on N GPUs only.
check() {
    local name=$group/$1 limit=$2 begin=$SECONDS log rc counts verdict one=
    shift 2
    for one in "${wanted[@]}"; do
        [[ $one == all || $one == "$group" || $one == "$name" ]] && { one=yes; break; }
    done
    [[ $one == yes ]] || return 0
    if [[ $show ]]; then echo "$name ($limit s): $*"; return 0; fi
    if ((gpus < ${needs:-0})); then
        lines+=("SKIPPED  $name: it needs $needs GPUs") bad=$((bad + 1))
        return 0
    fi
    if ((SECONDS + limit > budget)); then
        lines+=("NOT RUN  $name: no time left") bad=$((bad + 1))
        return 0
    fi
    log=$logs/${name//\//.}.txt
    (cd "$kit" && exec timeout -k 5 "$limit" env "$@") >"$log" 2>&1 </dev/null
    rc=$?
    counts=$(awk '/^test result:/ { t++; p += $4; f += $6 } /(^|\.\.\. )skipped: / { s++ }
        END { if (t) printf "%d passed, %d failed, %d skipped", (p > s ? p - s : 0), f, s }' "$log")
    verdict=ok
    if ((rc == 124 || rc == 137)); then verdict="TIMEOUT"; elif ((rc)); then verdict="FAILED $rc"; fi
    [[ $counts == 0\ passed,\ 0* ]] && verdict=SKIPPED
    [[ $verdict == ok ]] && good=$((good + 1)) || bad=$((bad + 1))
    lines+=("$verdict  $name, $((SECONDS - begin)) s${counts:+: $counts}")
    echo "${lines[-1]}"
    # What explains a failure, and what a measurement prints.
    [[ $group == times && $verdict == ok ]] && grep -a "µs\|: dispatch\|: combine\|: pair\|^T " "$log" | cut -c1-220
    if [[ $verdict != ok ]]; then grep -aE "panicked|FAILED|^error|Error|left:|right:|rank [0-9]|WRONG|skipped" "$log" | cut -c1-300 | head -12; fi
}

# Tests of one executable: NAME LIMIT [VARIABLE=VALUE ...] EXECUTABLE FILTER ...
tests() {
    local name=$1 limit=$2
    shift 2
    check "$name" "$limit" RUST_BACKTRACE=0 "$@" --test-threads=1 --nocapture
}

core=lib/deepep_core
group=kernels
tests every-case 150 "DEEPEP_TEST_RANKS=${DEEPEP_TEST_RANKS:-1,2,4}" $core every_case_matches
tests not-early 60 DEEPEP_TEST_EARLY=0 DEEPEP_TEST_RANKS=2 DEEPEP_TEST_CASES=packets $core every_case_matches
tests planted 30 $core a_planted_error
tests faults 60 $core cuda::gpu_tests::faults
tests rounds 60 DEEPEP_TEST_ROUNDS=60 DEEPEP_TEST_RANKS=2 $core rounds_without_waits
needs=2 tests control 60 $core rows_arrive_late
tests collectives 60 $core cuda::gpu_tests::collective

group=memory
tests vmm 60 test/vmm gpu
tests processes 60 test/vmm_processes gpu
tests multicast 30 test/multicast_support gpus_tell

group=nccl
for i in "${!nccls[@]}"; do
    tests "library-$i" 100 "NCCL_GIN_LIBRARY=${nccls[i]}" test/nccl_gpu
    check "properties-$i" 20 "NCCL_GIN_LIBRARY=${nccls[i]}" example/properties
    check "window-$i" 30 "NCCL_GIN_LIBRARY=${nccls[i]}" example/window
done

group=gin
for i in "${!nccls[@]}"; do
    check "put-$i" 30 "NCCL_GIN_LIBRARY=${nccls[i]}" example/gin_put "$GIN_SOFT_LIBRARY"
    tests "suite-$i" 40 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu suite::two_nodes --exact
    tests "one-gpu-$i" 40 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu suite::two_nodes_on_one_gpu --exact
    tests "segments-$i" 30 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu segments::a_window_of_device_and_host_memory --exact
    tests "killed-$i" 30 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu failures::a_killed_rank --exact
    tests "four-$i" 40 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu suite::four_ranks_as_two_nodes --exact
    tests "eight-$i" 60 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu suite::eight_ranks_as_two_nodes --exact
    tests "rails-$i" 40 "NCCL_GIN_LIBRARY=${nccls[i]}" test/gin_gpu suite::four_ranks_on_rails --exact
    tests "figures-$i" 40 "NCCL_GIN_LIBRARY=${nccls[i]}" GIN_FIGURES=1 test/gin_gpu figures::figures --exact
done

group=buffers
tests graphs 40 test/gpu_buffers
tests bad-input 40 test/bad_input gpu
tests results 40 test/results gpu
tests foreign 30 test/foreign_views gpu
tests inputs 40 test/combine_input gpu
tests ops 120 DEEPEP_TEST_ROUNDS=160 test/ops gpu
tests faults 150 test/faults gpu
group=rounds
tests ten-thousand 250 DEEPEP_TEST_ROUNDS=10000 test/ops random_rounds::gpu

group=run
run() { check "$1" 40 bin/deepep run --backend cuda --timeout 20 "${@:2}"; }
run default
for n in 1 2 4 8; do
    run "processes-$n" --ranks $n --tokens 256
    run "threads-$n" --ranks $n --threads --tokens 256
done
run fp8-expanded --dtype fp8 --expanded 128 --cached --zero-padding
run at-source --expanded --reduction at-source --narrow-ids --biases 2
run without-counts --without-counts --routing zipf --dtype fp16
run idle --routing idle:0 --dtype fp32
run pull --pull
run rows --no-packets --tokens 64
[[ -z ${TRACE:-} ]] || run trace --ranks 4 --trace "$(realpath "$TRACE")"
check doctor 30 bin/deepep doctor

group=collectives
tests buffers 120 test/collectives gpu
check bench 150 "BENCH_MAX=${BENCH_MAX:-1073741824}" "NCCL_GIN_LIBRARY=${nccls[-1]}" NCCL_MULTI_RANK_GPU_ENABLE=1 bench/collectives --bench

group=times
times() { check "$1" 90 "${@:2}" $core times::times --ignored --nocapture --test-threads=1; }
times small DEEPEP_TEST_TOKENS=1,32,128 DEEPEP_TEST_BLOCKS=0
times large DEEPEP_TEST_TOKENS=4096,8192 DEEPEP_TEST_BLOCKS=0,16 DEEPEP_TEST_ONLY=dispatch,cached,combine
times pulled DEEPEP_TEST_TOKENS=4096,8192 DEEPEP_TEST_BLOCKS=0,16 DEEPEP_TEST_ONLY=combine DEEPEP_TEST_PLACEMENT=Plain DEEPEP_TEST_PULLED=64
times not-early DEEPEP_TEST_TOKENS=1,32,128 DEEPEP_TEST_BLOCKS=0 DEEPEP_TEST_ONLY=pair DEEPEP_TEST_PLACEMENT=Expanded DEEPEP_TEST_EARLY=0
timeline() { check "$1" 60 "${@:2}" $core gpu_tests::timeline::timelines --ignored --nocapture --test-threads=1; }
timeline timeline DEEPEP_TEST_TOKENS=1,32,128 DEEPEP_TEST_PLACEMENT=Expanded DEEPEP_TEST_ROWS=FP8
timeline timeline-rows DEEPEP_TEST_TOKENS=4096
check bench 240 bin/deepep bench --quick
check vmm 60 bench/vmm --bench
check overhead 60 bench/vmm_overhead --bench
check nccl 60 "NCCL_GIN_LIBRARY=${nccls[-1]}" bench/nccl --bench

group=sanitize
small="as it comes;one token;scales of odd length;two biases"
for tool in memcheck racecheck; do
    check $tool 90 DEEPEP_TEST_TIMEOUT=60 DEEPEP_TEST_RANKS=1 "DEEPEP_TEST_CASES=$small" \
        compute-sanitizer --tool $tool --error-exitcode 9 $core every_case_matches --nocapture
done

[[ $show ]] && exit 0
echo "== $gpus GPUs, $SECONDS s"
printf '%s\n' "${lines[@]}" | grep -v '^ok' || true
echo "$good checks passed, $bad did not"
((bad == 0))
