#!/usr/bin/env bash
# Tests and times qkv's CUDA kernels where there is nothing but NVIDIA's driver. Made by `cargo xtask gpu`: copy the whole folder.
#
#   ./run.sh            everything, in less than eight minutes
#   ./run.sh --quick    without the slow parts (or QKV_GPU_QUICK=1)
#
#   QKV_GPU_DRIVER=libptxsim.so   a stand-in for the driver, to try this script where there is no GPU: nothing is timed
#   QKV_GPU_PATIENCE=4            with a stand-in: so many times the limits
set -u
cd "$(dirname "$0")" || exit 1
here=$PWD
quick=${QKV_GPU_QUICK:-}
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    *)
      echo "error: $argument is unknown; --quick leaves out the slow parts" >&2
      exit 2
      ;;
  esac
done
command -v timeout >/dev/null || { echo "error: timeout (GNU coreutils) is needed" >&2; exit 2; }

# Seconds that everything may take, what runs into its limit and must be killed included.
total=@TOTAL@
smoke=
if [ -n "${QKV_GPU_DRIVER:-}" ]; then
  [ -f "$QKV_GPU_DRIVER" ] || { echo "error: QKV_GPU_DRIVER=$QKV_GPU_DRIVER is no file" >&2; exit 2; }
  export PTXSIM_DRIVER=sim PTXSIM_LIBRARY=$QKV_GPU_DRIVER
  patience=${QKV_GPU_PATIENCE:-1}
  smoke=--smoke
  on="A STAND-IN for the driver, $QKV_GPU_DRIVER: NO GPU WAS TESTED, and no time means anything"
else
  # Without one that works every test fails; nothing falls back to the stand-in.
  export PTXSIM_DRIVER=real
  unset PTXSIM_LIBRARY
  patience=1
  on="NVIDIA's driver"
fi
export QKV_GOLDEN_DIR=$here/golden
# What an earlier run left would pass for this one's.
rm -rf logs
mkdir logs
start=$(date +%s)
names=()
results=()
times=()
failed=0
# Why nothing more is run.
stop=

note() {
  names+=("$1")
  results+=("$2")
  times+=("$3")
}

# part NAME SECONDS WHEN PROGRAM ARGUMENT..: WHEN is `slow` for what --quick leaves out.
part() {
  local name=$1 limit=$(($2 * patience)) when=$3
  shift 3
  local left=$((total * patience - $(date +%s) + start)) log=logs/$name.txt
  if [ -n "$stop" ]; then
    note "$name" "not run: $stop" 0
    return
  fi
  if [ "$when" = slow ] && [ -n "$quick" ]; then
    note "$name" "left out (--quick)" 0
    return
  fi
  if [ "$left" -le 0 ]; then
    failed=1
    note "$name" "NOT RUN: the time is up" 0
    return
  fi
  [ "$left" -lt "$limit" ] && limit=$left
  echo "== $name (at most $limit s)"
  local begun code
  begun=$(date +%s)
  timeout -k 2 "$limit" "$@" >"$log" 2>&1
  code=$?
  local seconds=$(($(date +%s) - begun)) passed
  passed=$(sed -n 's/^test result: .* \([0-9]*\) passed; .*/\1/p' "$log" | tail -1)
  case $code in
    0) note "$name" "ok${passed:+, $passed passed}" "$seconds" ;;
    124 | 137)
      failed=1
      note "$name" "FAILED: over $limit s" "$seconds"
      tail -5 "$log"
      ;;
    *)
      failed=1
      note "$name" "FAILED, see $log" "$seconds"
      # Names of tests that failed, or the last words.
      if ! sed -n '/^failures:$/,/^test result/p' "$log" | grep '^    [a-z]' | sort -u | head -40 | grep .; then
        tail -15 "$log"
      fi
      [ "$name" = driver ] && stop="there is no driver with a device"
      ;;
  esac
}

echo "qkv on a GPU, @VERSION@, built for @ARCHITECTURES@; $(date -u '+%Y-%m-%d %H:%M:%S UTC')"
echo "runs on: $on"
query=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,temperature.gpu,power.limit
if [ -z "$smoke" ] && command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=$query --format=csv,noheader || echo "nvidia-smi failed"
else
  echo "nvidia-smi was not asked"
fi

@PARTS@

# The table: names are padded to the longest.
width=4
for name in "${names[@]}"; do
  [ ${#name} -gt $width ] && width=${#name}
done
echo
[ -f logs/driver.txt ] && [ -z "$stop" ] && tail -1 logs/driver.txt
if [ -n "$stop" ]; then
  echo "ran on nothing: $stop"
else
  echo "ran on: $on"
  [ -f logs/bench.txt ] && cat logs/bench.txt
fi
echo
printf "%-${width}s | %8s | %s\n" part seconds result
for i in "${!names[@]}"; do
  printf "%-${width}s | %8s | %s\n" "${names[$i]}" "${times[$i]}" "${results[$i]}"
done
printf "%-${width}s | %8s | %s\n" all $(($(date +%s) - start)) "$([ $failed = 0 ] && echo ok || echo FAILED)"
exit $failed
