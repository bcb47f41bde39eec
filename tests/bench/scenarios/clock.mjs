// One clock for all processes of a run.

/** Milliseconds, with fractions; never steps, and agrees between processes to well under a millisecond. */
export function clock() {
  return performance.timeOrigin + performance.now();
}

/** Resolves at `moment` of {@link clock}. */
export function until(moment) {
  return new Promise((resolve) => setTimeout(resolve, Math.max(0, moment - clock())));
}
