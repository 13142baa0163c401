// The difference of two texts, word by word, from their longest common subsequence.

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const LINES = /[^\n]*\n|[^\n]+$/g;
const MOST_CELLS = 4e6; // of the table; texts that need more are compared by lines, and then as wholes

/** Parts ["same" | "removed" | "added", text]: without those added they are `before`, without those removed `after`. */
export function difference(before, after) {
  return joined(compared(pieces(before, WORDS), pieces(after, WORDS), [LINES, /^[^]+$/g]));
}

const pieces = (text, pattern) => text.match(pattern) ?? [];

/** Compare lists of pieces; if they differ in too many, their texts cut by the next of the `coarser` patterns. */
function compared(a, b, coarser) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const same = (part) => part.map((piece) => ["same", piece]);
  const [left, right] = [a, b].map((all) => all.slice(start, all.length - end));
  const large = left.length * right.length > MOST_CELLS;
  const [pattern, ...rest] = coarser;
  const middle = large ? compared(pieces(left.join(""), pattern), pieces(right.join(""), pattern), rest) : aligned(left, right);
  return [...same(a.slice(0, start)), ...middle, ...same(a.slice(a.length - end))];
}

function aligned(a, b) {
  const width = b.length + 1;
  const common = new Uint32Array((a.length + 1) * width); // at [i, j]: pieces that a from i on and b from j on share
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const at = i * width + j;
      common[at] = a[i] === b[j] ? common[at + width + 1] + 1 : Math.max(common[at + width], common[at + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const at = i * width + j;
    if (i < a.length && j < b.length && a[i] === b[j]) {
      parts.push(["same", a[i]]);
      i += 1;
      j += 1;
    } else if (j === b.length || (i < a.length && common[at + width] >= common[at + 1])) {
      parts.push(["removed", a[i]]);
      i += 1;
    } else {
      parts.push(["added", b[j]]);
      j += 1;
    }
  }
  return parts;
}

/** Adjacent parts of one kind become one; of a change, what was removed comes first. */
function joined(parts) {
  const result = [];
  let change = { removed: "", added: "" };
  const flush = () => {
    for (const kind of ["removed", "added"]) if (change[kind]) result.push([kind, change[kind]]);
    change = { removed: "", added: "" };
  };
  for (const [kind, text] of parts) {
    if (kind !== "same") change[kind] += text;
    else {
      flush();
      if (result.at(-1)?.[0] === "same") result.at(-1)[1] += text;
      else result.push(["same", text]);
    }
  }
  flush();
  return result;
}
