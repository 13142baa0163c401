// The range of an axis on which a few values are far above the others.

const TALL = 2; // times the usual height, above which a value is cut off
const ROOM = 1.25;
const USUAL = 0.95; // share of the values that are drawn whole
const FEW = 4; // of fewer values none is unusual

/** Where the axis ends so that a few `values` far above the others do not flatten them; `high`, their highest, if none is. */
export function calmTop(values, high) {
  const found = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (found.length < FEW) return high;
  const usual = found[Math.min(found.length - 2, Math.floor(USUAL * found.length))];
  return high > TALL * usual && usual > 0 ? ROOM * usual : high;
}
