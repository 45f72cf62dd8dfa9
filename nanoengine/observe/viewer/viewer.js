// The viewer's page: reads the columns of a trace, computes the state at any step, and draws it.
//
//   data ── unpack ──► columns ── Fold.seek(frame) ──► refs, content, owner of each block
//                                                         │
//   state.frame, .lane, .block, .only, .view ──► draw: tracks, lanes, pool, cards
//
// A frame is a step, or several steps of a very long run. A lane is a sequence. Events are changes
// of blocks; observe/viewer/page_data.py generates them and documents each number.
"use strict";

// --- data ----------------------------------------------------------------------------------------

const TAKE = 0, DROP = 1, INDEX = 2, EVICT = 3, SHIFT = 27;
const WAITING = 0, PREFILL = 1, DECODE = 2, PREEMPTED = 3, IDLE = 4;
const PARTS = ["schedule", "prepare", "load", "forward", "sample", "commit"];
const WAIT_REASONS = { row: "one of max_num_seqs sequences to finish", blocks: "free blocks", budget: "a larger token budget of a step",
  policy: "the admission policy: it would not fit at the predicted peak", token: "its last token, which is still being computed" };
const $ = (id) => document.getElementById(id);

async function unpack() {
  const text = $("data").textContent.trim();
  $("data").remove();
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const meta = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  let at = 4 + length;
  for (const [name, count] of Object.entries(meta.columns)) {
    columns[name] = new Int32Array(buffer, at, count);
    at += 4 * count;
  }
  for (let lane = 0; lane < meta.lanes.length; lane++) {  // Sent as differences, lane by lane.
    for (let i = columns.tokensOf[lane] + 1; i < columns.tokensOf[lane + 1] && columns.tokenFrames.length; i++) {
      columns.tokenFrames[i] += columns.tokenFrames[i - 1];
    }
  }
  return { meta, columns };
}

// BLOCKS: number of drawn blocks, up to the last one that the run used; USABLE: blocks in the pool.
let D, M, LANES, FRAMES, SIZE, BLOCKS, USABLE, TIERS, fold, byBlock, byLane, marksOf, notesOf, requestLinesOf;

// Positions of the events per block, or per lane: key k has order[starts[k]..starts[k+1]].
function grouped(num, keyOf) {
  const total = D.events.length / 3, starts = new Int32Array(num + 1);
  for (let e = 0; e < total; e++) { const k = keyOf(e); if (k >= 0 && k < num) starts[k + 1]++; }
  for (let k = 0; k < num; k++) starts[k + 1] += starts[k];
  const next = starts.slice(), order = new Int32Array(starts[num]);
  for (let e = 0; e < total; e++) { const k = keyOf(e); if (k >= 0 && k < num) order[next[k]++] = e; }
  return { starts, order };
}
const kindOf = (e) => D.events[3 * e] >>> SHIFT;
const blockOf = (e) => D.events[3 * e] & ((1 << SHIFT) - 1);
const laneOf = (e) => D.events[3 * e + 1];
const argumentOf = (e) => D.events[3 * e + 2];
const entryOf = (e) => argumentOf(e) & 0xffffff;

// The last index i with column[i] <= value, between from and to; from - 1 if there is none.
function lastAtMost(column, value, from = 0, to = column.length) {
  let low = from - 1, high = to;
  while (high - low > 1) { const mid = (low + high) >> 1; if (column[mid] <= value) low = mid; else high = mid; }
  return low;
}
const frameOfEvent = (e) => lastAtMost(D.eventsOf, e);

// --- state of the pool ---------------------------------------------------------------------------

// The pool's content after a frame. A copy is kept at intervals, so that a jump replays few events.
class Fold {
  static SPACING = 150000;
  constructor() {
    this.refs = new Int32Array(BLOCKS);
    this.content = new Int32Array(BLOCKS).fill(-1);  // number of a content, or -1
    this.owner = new Int32Array(BLOCKS).fill(-1);    // the lane that took it last
    this.entry = new Int32Array(BLOCKS);             // of the owner's table
    this.touched = new Int32Array(BLOCKS).fill(-1);  // the last frame that took or dropped it
    this.frame = -1;
    this.snapshots = [{ frame: -1, state: this.copy() }];
  }
  copy() { return [this.refs, this.content, this.owner, this.entry, this.touched].map((a) => a.slice()); }
  seek(frame) {
    let from = this.snapshots.length - 1;
    while (this.snapshots[from].frame > frame) from--;
    if (frame < this.frame || this.snapshots[from].frame > this.frame) {
      [this.refs, this.content, this.owner, this.entry, this.touched].forEach((a, i) => a.set(this.snapshots[from].state[i]));
      this.frame = this.snapshots[from].frame;
    }
    while (this.frame < frame) this.step(++this.frame);
  }
  step(frame) {
    const { events, eventsOf } = D, { refs, content, owner, entry, touched } = this;
    for (let e = eventsOf[frame]; e < eventsOf[frame + 1]; e++) {
      const kind = events[3 * e] >>> SHIFT, block = events[3 * e] & ((1 << SHIFT) - 1);
      if (kind === TAKE) { refs[block]++; owner[block] = events[3 * e + 1]; entry[block] = events[3 * e + 2]; touched[block] = frame; }
      else if (kind === DROP) { refs[block]--; touched[block] = frame; }
      else if (kind === INDEX) content[block] = events[3 * e + 2];
      else content[block] = -1;
    }
    const last = this.snapshots[this.snapshots.length - 1].frame;
    if (eventsOf[frame + 1] - eventsOf[last + 1] > Fold.SPACING) this.snapshots.push({ frame, state: this.copy() });
  }
  status(block) { return block === 0 ? "null" : this.refs[block] ? "active" : this.content[block] >= 0 ? "cached" : "empty"; }
}

// Block tables of a lane after a frame: group -> entries; 0: no block.
function tablesOf(lane, frame) {
  const tables = M.header.groups.map(() => []), { starts, order } = byLane, end = D.eventsOf[frame + 1];
  for (let i = starts[lane]; i < starts[lane + 1] && order[i] < end; i++) {
    const e = order[i], kind = kindOf(e), group = argumentOf(e) >> 24;
    if (kind === TAKE) tables[group][entryOf(e)] = blockOf(e);
    else if (kind === DROP && tables[group][entryOf(e)] === blockOf(e)) tables[group][entryOf(e)] = 0;
  }
  return tables.map((table) => {
    const whole = Array.from(table, (block) => block || 0);
    while (whole.length && !whole[whole.length - 1]) whole.pop();
    return whole;
  });
}

// Lanes whose tables reference a block after a frame.
function ownersOf(block, frame) {
  const owners = new Map(), { starts, order } = byBlock, end = D.eventsOf[frame + 1];
  for (let i = starts[block]; i < starts[block + 1] && order[i] < end; i++) {
    const kind = kindOf(order[i]), lane = laneOf(order[i]);
    if (kind === TAKE) owners.set(lane, (owners.get(lane) || 0) + 1);
    else if (kind === DROP) { const left = owners.get(lane) - 1; if (left) owners.set(lane, left); else owners.delete(lane); }
  }
  return [...owners.keys()];
}

// Number of known tokens of a lane after a frame.
function knownTokens(lane, frame) {
  const from = D.tokensOf[lane], to = D.tokensOf[lane + 1];
  return lastAtMost(D.tokenFrames, frame, from, Math.min(to, D.tokenFrames.length)) + 1 - from;
}
const spansOf = (lane) => {
  const spans = [];
  for (let i = D.spansOf[lane]; i < D.spansOf[lane + 1]; i += 4) spans.push(D.spans.subarray(i, i + 4));
  return spans;
};
function spanAt(lane, frame) {
  for (let i = D.spansOf[lane]; i < D.spansOf[lane + 1]; i += 4) if (D.spans[i] <= frame && frame <= D.spans[i + 1]) return D.spans.subarray(i, i + 4);
  return null;
}
// Number of its tokens whose keys and values are in blocks after a frame.
function computedTokens(lane, frame) {
  const span = spanAt(lane, frame);
  if (!span || span[2] === WAITING || span[2] === PREEMPTED) return D.tokenFrames.length ? knownTokens(lane, frame - 1) : 1e9;
  return span[2] === DECODE && D.tokenFrames.length ? Math.max(knownTokens(lane, frame - 1), 0) : span[3] - (span[2] === DECODE ? span[1] - frame : 0);
}
function textOf(lane, from, to) {
  const first = D.tokensOf[lane], ids = D.tokens.subarray(first + from, first + to);
  return M.words ? Array.from(ids, (id) => M.words[id] ?? `[${id}]`).join("") : Array.from(ids).join(" ");
}

// --- state ---------------------------------------------------------------------------------------

let laneOrder = [], tints = [];  // lanes from top to bottom, and the colour of each: neighbours differ
const tintOf = (lane) => tints[lane] ?? lane % 8;
const state = { frame: 0, lane: -1, block: -1, only: null, onlyText: "", view: [0, 1], playing: false };
let colours = {}, shown = [];  // lanes that are listed
const stepNumber = (frame) => D.step[frame];
const frameOfStep = (step) => Math.max(0, Math.min(FRAMES - 1, lastAtMost(D.step, step - 1) + 1));
const nameOf = (lane) => {
  const info = LANES[lane];
  return info ? (info.first === false ? `${info.id} (sequence ${info.seq})` : info.id) : "a request without a lane";
};
const plural = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "0 %");

function setFrame(frame) {
  state.frame = Math.max(0, Math.min(FRAMES - 1, Math.round(frame)));
  const [a, b] = state.view;
  if (state.frame < a || state.frame + 1 > b) setView(state.frame - (b - a) / 4, state.frame - (b - a) / 4 + (b - a));
  fold.seek(state.frame);
  drawStep();
}
function setView(a, b) {
  const width = Math.max(Math.min(b - a, FRAMES), Math.min(12, FRAMES));
  const from = Math.max(0, Math.min(FRAMES - width, a));
  state.view = [from, from + width];
  drawTracks();
}
function zoom(factor) {
  const [a, b] = state.view, centre = Math.min(Math.max(state.frame + 0.5, a), b);
  setView(centre - (centre - a) * factor, centre - (centre - a) * factor + (b - a) * factor);
}
function choose(lane, block, focus = false) {
  Object.assign(state, { lane, block });
  drawLanes(); drawStep();
  if (focus) { $("chosen").focus({ preventScroll: true }); $("chosen").scrollIntoView({ block: "nearest" }); }
}
function showOnly(lanes, text) {
  Object.assign(state, { only: lanes, onlyText: text });
  $("unfilter").hidden = !lanes;
  $("unfilter").textContent = lanes ? `only ${plural(lanes.size, "sequence")}: ${text} ✕` : "";
  listLanes(); drawLanes(); drawStep();
}
let hashTimer = 0;
function writeHash() {  // Not at every frame: browsers limit how often an address may change.
  clearTimeout(hashTimer);
  hashTimer = setTimeout(() => {
    const parts = [`step=${stepNumber(state.frame)}`];
    if (state.lane >= 0) parts.push(`sequence=${LANES[state.lane].seq}`);
    if (state.block >= 0) parts.push(`block=${state.block}`);
    history.replaceState(null, "", "#" + parts.join("&"));
  }, 200);
}
function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d+$/.test(hash.get(name) ?? "") ? Number(hash.get(name)) : -1);
  state.lane = LANES.findIndex((lane) => lane.seq === number("sequence"));
  state.block = number("block") < BLOCKS ? number("block") : -1;
  drawLanes();
  setFrame(number("step") >= 0 ? frameOfStep(number("step")) : state.frame);
}

// --- colours and canvases ------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
  colours = { lanes: [0, 1, 2, 3, 4, 5, 6, 7].map((i) => get(`--c${i}`)) };
  for (const name of ["bg", "surface", "ink", "soft", "line", "faint", "accent", "warn", "old", "young"]) colours[name] = get(`--${name}`);
  colours.on = colours.lanes.map((c) => (luminance(c) > 0.36 ? "#000" : "#fff"));
  colours.hatch = colours.lanes.map((c) => hatch(c));
  colours.ages = Array.from({ length: 16 }, (_, i) => mix(colours.young, colours.old, i / 15));
  colours.rgb = new Map();
}
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const luminance = (hex) => rgb(hex).reduce((sum, v, i) => sum + [0.2126, 0.7152, 0.0722][i] * (v / 255) ** 2.2, 0);
const mix = (a, b, t) => "#" + rgb(a).map((v, i) => Math.round(v + (rgb(b)[i] - v) * t).toString(16).padStart(2, "0")).join("");
function pixel(hex) {  // as ImageData has it
  let value = colours.rgb.get(hex);
  if (value === undefined) { const [r, g, b] = rgb(hex); colours.rgb.set(hex, (value = (255 << 24) | (b << 16) | (g << 8) | r)); }
  return value;
}
function hatch(colour) {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.strokeStyle = colour; pen.lineWidth = 1.6;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) { pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}
// A canvas as wide as its container, in device pixels; draws in CSS pixels.
function penOf(canvas, height) {
  const width = canvas.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return { pen, width, height };
}

// --- tracks along the steps ----------------------------------------------------------------------

let gutter = 64;
const PAD = 10;
const xOf = (frame, width) => gutter + ((frame - state.view[0]) / (state.view[1] - state.view[0])) * (width - gutter - PAD);
const frameAt = (x, width) => Math.floor(state.view[0] + ((x - gutter) / (width - gutter - PAD)) * (state.view[1] - state.view[0]));
const trackOf = (name) => document.querySelector(`[data-track="${name}"]`);

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].find((n) => n * power >= value) * power;
}
// Stacked bars; if several frames share a pixel, the tallest one is drawn.
function drawBars(name, columns, fills, scale) {
  const { pen, width, height } = penOf(trackOf(name).querySelector("canvas"), 84);
  const [a, b] = state.view, first = Math.floor(a), last = Math.min(Math.ceil(b), FRAMES), total = (f) => columns.reduce((sum, c) => sum + c[f], 0);
  // Outliers are cut off: one step that compiles kernels would flatten all others.
  const totals = Array.from({ length: last - first }, (_, i) => total(first + i)).sort((x, y) => x - y);
  const most = totals[totals.length - 1], usual = totals[Math.floor(0.98 * (totals.length - 1))];
  const top = niceTop((most > 4 * usual ? 1.3 * usual : most || 1) / scale) * scale;
  const base = height - 14, tall = base - 4;
  axis(pen, width, base, tall, top / scale);
  const bar = Math.max(xOf(1, width) - xOf(0, width), 1), perPixel = Math.max(1, (b - a) / (width - gutter - PAD));
  for (let f = first; f < last; f += Math.max(1, Math.round(perPixel))) {
    let best = f;
    for (let g = f; g < Math.min(f + perPixel, last); g++) if (total(g) > total(best)) best = g;
    let y = base;
    const x = Math.max(xOf(f, width), gutter), gap = bar > 4 ? 1 : 0;
    columns.forEach((column, i) => {
      const h = Math.min((column[best] / top) * tall, y - base + tall);
      if (h <= 0) return;
      pen.fillStyle = fills[i];
      pen.fillRect(x, y - h, bar - gap, h);
      if (bar > 3 && typeof fills[i] !== "string") { pen.strokeStyle = colours.lanes[1]; pen.strokeRect(x + 0.5, y - h + 0.5, Math.max(bar - gap - 1, 0.5), Math.max(h - 1, 0.5)); }
      y -= h;
    });
    if (total(best) > top) drawGlyph(pen, "▲", x + bar / 2, base - tall + 5, colours.ink);
  }
  ticks(pen, width, height, a, b);
  if (!most) { pen.textAlign = "left"; pen.textBaseline = "middle"; pen.fillText("no times: this is a simulation", gutter + 8, base - tall / 4); }
}
function axis(pen, width, base, tall, top) {
  pen.strokeStyle = colours.line; pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(base - part * tall) + 0.5;
    pen.beginPath(); pen.moveTo(gutter, y); pen.lineTo(width - PAD, y); pen.stroke();
    if (part) pen.fillText((top * part).toLocaleString("en", { maximumSignificantDigits: 3 }), gutter - 5, Math.max(y, 6));
  }
}
function ticks(pen, width, height, a, b) {
  const every = niceTop((b - a) / Math.max(2, (width - gutter) / 90));
  pen.fillStyle = colours.soft; pen.textAlign = "center"; pen.textBaseline = "bottom";
  for (let f = Math.ceil(a / every) * every; f < b; f += Math.max(1, Math.round(every))) {
    const x = xOf(f + 0.5, width);
    if (x < width - 20) pen.fillText(stepNumber(f).toLocaleString("en"), x, height);
  }
}

const LANE = 18;
function listLanes() {
  const [a, b] = state.view;
  shown = [];
  for (const lane of laneOrder) {
    const from = D.spansOf[lane], to = D.spansOf[lane + 1];
    if (from === to || D.spans[from] >= b || D.spans[to - 3] + 1 <= a) continue;
    if (!state.only || state.only.has(lane)) shown.push(lane);
  }
  $("spacer").style.height = `${Math.max(shown.length * LANE - $("lanes").clientHeight, 0)}px`;
  if (shown.length * LANE < $("lanes").clientHeight) $("lanes").scrollTop = 0;
}

function drawLanes() {
  const box = $("lanes"), canvas = box.querySelector("canvas");
  const { pen, width, height } = penOf(canvas, box.clientHeight);
  const top = box.scrollTop, first = Math.floor(top / LANE), [a, b] = state.view;
  pen.textBaseline = "middle";
  for (let i = first; i < Math.min(shown.length, first + height / LANE + 2); i++) {
    const lane = shown[i], y = i * LANE - top, mid = y + LANE / 2, colour = colours.lanes[tintOf(lane)];
    if (lane === state.lane) { pen.fillStyle = colours.faint; pen.fillRect(0, y, width, LANE); pen.fillStyle = colours.accent; pen.fillRect(0, y, 4, LANE); }
    for (const [from, to, kind] of spansOf(lane)) {
      if (to + 1 < a || from > b) continue;
      const x0 = Math.max(xOf(from, width), gutter), x1 = Math.max(Math.min(xOf(to + 1, width), width - PAD), x0 + 1);
      if (kind === PREFILL) {
        pen.fillStyle = colours.hatch[tintOf(lane)]; pen.strokeStyle = colour; pen.lineWidth = 1;
        pen.fillRect(x0, y + 2, x1 - x0, LANE - 4);
        if (x1 - x0 > 3) pen.strokeRect(x0 + 0.5, y + 2.5, x1 - x0 - 1, LANE - 5);
      } else if (kind === DECODE) {
        pen.fillStyle = colour; pen.fillRect(x0, mid - 3, x1 - x0, 6);
      } else {
        pen.strokeStyle = kind === PREEMPTED ? colours.warn : kind === IDLE ? colour : colours.soft;
        pen.lineWidth = kind === IDLE ? 1 : 2;
        pen.setLineDash(kind === PREEMPTED ? [6, 4] : kind === IDLE ? [] : [2, 3]);
        pen.beginPath(); pen.moveTo(x0, mid); pen.lineTo(x1, mid); pen.stroke(); pen.setLineDash([]);
      }
    }
    for (const [frame, what] of marksOf[lane]) {
      if (frame < a - 1 || frame > b) continue;
      const x = xOf(frame, width), glyph = { preempted: "▼", loaded: "⇡", ended: "■", error: "!" }[what];
      if (glyph) drawGlyph(pen, glyph, what === "ended" ? xOf(frame + 1, width) : x, mid, what === "preempted" || what === "error" ? colours.warn : colours.ink);
    }
    for (const [frame, what, , cached] of marksOf[lane]) {
      if (what === "admitted" && cached > 0 && frame >= a && frame <= b) drawGlyph(pen, "◆", Math.max(xOf(frame, width), gutter + 5), mid, colours.ink);
    }
    pen.fillStyle = lane === state.lane ? colours.ink : colours.soft;
    pen.textAlign = "right";
    pen.fillText(short(nameOf(lane).replace(/ \(sequence (\d+)\)$/, "·$1"), gutter > 50 ? 9 : 6), gutter - 6, mid);
  }
  if (!shown.length) { pen.fillStyle = colours.soft; pen.textAlign = "left"; pen.fillText("no request in this part of the run", gutter, 14); }
}
const short = (text, length) => (text.length > length ? "…" + text.slice(1 - length) : text);
function drawGlyph(pen, glyph, x, y, colour) {
  pen.textAlign = "center";
  pen.strokeStyle = colours.surface; pen.lineWidth = 3; pen.strokeText(glyph, x, y);
  pen.fillStyle = colour; pen.fillText(glyph, x, y);
}

const charts = [];
function makeCurves() {
  const usable = USABLE, frames = Array.from({ length: FRAMES }, (_, f) => f + 0.5), map = (fn) => Array.from({ length: FRAMES }, (_, f) => fn(f));
  const seconds = (f) => D.t[f] / 1e4, span = Math.max(8, Math.round(FRAMES / 100)), sums = [new Float64Array(FRAMES + 1), new Float64Array(FRAMES + 1)];
  for (let f = 0; f < FRAMES; f++) { sums[0][f + 1] = sums[0][f] + D.sampled[f]; sums[1][f + 1] = sums[1][f] + D.prefill[f] + D.decode[f]; }
  const rate = (sum) => map((f) => { const g = Math.max(0, f - span), s = seconds(f) - seconds(g); return s > 0 ? (sum[f + 1] - sum[g + 1]) / s : null; });
  const slots = SIZE * M.header.groups.length;
  const curves = [
    ["pool", [["in use", map((f) => (100 * D.active[f]) / usable)], ["in use or cached", map((f) => (100 * (D.active[f] + D.cached[f])) / usable)]], "%", 100],
    ["prompt tokens found in the prefix cache so far", [["hit rate", map((f) => (D.queried[f] ? (100 * D.hit[f]) / D.queried[f] : null))]], "%", 100],
    ["waste", [["empty slots of blocks in use", map((f) => (D.active[f] ? Math.min(100, (100 * D.empty[f]) / (D.active[f] * SIZE)) : 0))],
      ["recomputed tokens", map((f) => (D.prefill[f] + D.decode[f] ? (100 * D.recomputed[f]) / (D.prefill[f] + D.decode[f]) : 0))]], "%", null],
    [`tokens per second, over ${plural(span * M.stepsPerFrame, "step")}`, [["sampled", rate(sums[0])], ["computed", rate(sums[1])]], "", null],
  ];
  for (const [title, series, unit, top] of curves) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), box = document.createElement("div"), cursor = document.createElement("div");
    figure.className = "track"; cursor.className = "cursor"; figure.dataset.track = "curve";
    figure.append(caption, box, cursor);
    $("curves").append(figure);
    charts.push({ title, series, unit, top, figure, caption, box, frames, plot: null });
  }
}
function drawCurves() {
  for (const chart of charts) {
    const width = chart.figure.clientWidth;
    if (!chart.plot || chart.theme !== colours) {
      chart.plot?.destroy();
      chart.theme = colours;
      const line = (label, i) => ({ label, stroke: colours.lanes[i], width: 1.6, dash: i ? [5, 3] : undefined, points: { show: false }, fill: i || !chart.top ? undefined : colours.lanes[0] + "33" });
      chart.plot = new uPlot({
        width, height: 88, padding: [6, PAD, 0, 0], legend: { show: false }, cursor: { show: false },
        scales: { x: { time: false, range: () => state.view }, y: { range: (_, low, high) => [0, chart.top ?? niceTop(high || 1)] } },
        axes: [{ show: true, size: 16, font: "11px system-ui", stroke: colours.soft, grid: { show: false }, ticks: { show: false }, gap: 2,
          values: (_, splits) => splits.map((f) => (Number.isInteger(f) && f < FRAMES ? stepNumber(f).toLocaleString("en") : "")) },
          { size: gutter, font: "11px system-ui", stroke: colours.soft, gap: 4, space: 26, grid: { stroke: colours.line, width: 1 }, ticks: { show: false } }],
        series: [{}, ...chart.series.map(([label], i) => line(label, i))],
      }, [chart.frames, ...chart.series.map(([, values]) => values)], chart.box);
    } else {
      if (chart.plot.width !== width) chart.plot.setSize({ width, height: 88 });
      chart.plot.setScale("x", { min: state.view[0], max: state.view[1] });
    }
  }
}

function drawTracks() {
  gutter = parseInt(getComputedStyle(document.documentElement).getPropertyValue("--gutter"));
  drawBars("tokens", [D.prefill, D.decode], [colours.hatch[1], colours.lanes[0]], 1);
  drawBars("time", PARTS.map((name) => D[name]), [5, 4, 3, 0, 2, 1].map((i) => colours.lanes[i]), 1000);
  listLanes(); drawLanes(); drawCurves(); moveCursors();
}
function moveCursors() {
  for (const cursor of document.querySelectorAll(".cursor")) {
    const width = cursor.parentElement.clientWidth, x = xOf(state.frame + 0.5, width);
    cursor.style.transform = `translateX(${x - 1}px)`;
    cursor.style.visibility = x < gutter || x > width ? "hidden" : "visible";
  }
}

// --- the pool ------------------------------------------------------------------------------------

const MODES = {
  request: "Blocks have the colour of their request.",
  prefix: "Blocks have the colour of the first block of their prefix; grey: not indexed.",
  age: "Stronger colours: allocated or released more recently.",
};
const pool = { columns: 1, cell: 1, top: 0, height: 0, strip: 24 };
function layoutPool() {
  const width = $("pool").clientWidth, most = Math.max(260, Math.min(innerHeight * 0.5, 520));
  let cell = Math.min(58, Math.floor(Math.sqrt((width * most) / BLOCKS)));
  while (cell > 2 && Math.ceil(BLOCKS / Math.floor(width / cell)) * cell > most) cell--;
  pool.cell = Math.max(cell, 2);
  pool.columns = Math.max(1, Math.min(Math.floor(width / pool.cell), BLOCKS));
  pool.rows = Math.ceil(BLOCKS / pool.columns);
  pool.top = pool.rows * pool.cell + 8;
  pool.height = pool.top + TIERS.length * pool.strip;
}
const isSmall = () => pool.cell < 9;
const placeOf = (block) => [(block % pool.columns) * pool.cell, Math.floor(block / pool.columns) * pool.cell];

// Index of a block's colour: 0 to 7 in the palette, 8 to 23 ages, -1 none.
function colourNumber(block, mode) {
  if (mode === "age") return fold.touched[block] < 0 ? -1 : 8 + Math.min(15, Math.floor(2 * Math.log2(1 + state.frame - fold.touched[block])));
  if (mode === "prefix") return fold.content[block] < 0 ? -1 : D.rootOf[fold.content[block]] % 8;
  return fold.owner[block] < 0 ? -1 : tintOf(fold.owner[block]);
}
const colourOf = (number) => (number < 0 ? colours.soft : number < 8 ? colours.lanes[number] : colours.ages[number - 8]);

// Blocks of the selected request, or of the search results; null: no selection.
function highlighted() {
  const lanes = state.lane >= 0 ? [state.lane] : state.only ? [...state.only].filter((lane) => spanAt(lane, state.frame)) : null;
  return lanes && new Set(lanes.flatMap((lane) => tablesOf(lane, state.frame).flat()));
}
function changes() {  // of this frame: block -> "new", "gone" or "lost"
  const changed = new Map();
  for (let e = D.eventsOf[state.frame]; e < D.eventsOf[state.frame + 1]; e++) {
    const kind = kindOf(e), block = blockOf(e);
    if (kind === TAKE) changed.set(block, "new");
    else if (kind === DROP && !fold.refs[block]) changed.set(block, "gone");
    else if (kind === INDEX && !changed.has(block)) changed.set(block, "indexed");
  }
  return changed;
}

function drawPool() {
  const { pen, width } = penOf($("pool").querySelector("canvas"), pool.height);
  const mode = $("colour").value, light = highlighted();
  if (isSmall()) drawDots(pen, mode, light); else drawCells(pen, mode, light);
  pen.globalAlpha = 1;
  drawTiers(pen, width);
  drawArrows(pen, width);
  const box = $("box");
  box.hidden = state.block < 0;
  if (state.block >= 0) placeBox(box, state.block);
}
function placeBox(box, block) {
  const [x, y] = placeOf(block), size = Math.max(pool.cell, 8), shift = (size - pool.cell) / 2;
  Object.assign(box.style, { left: `${x - shift - 2}px`, top: `${y - shift - 2 + box.parentElement.querySelector("canvas").offsetTop}px`, width: `${size + 4}px`, height: `${size + 4}px` });
}

function drawCells(pen, mode, light) {
  const c = pool.cell, gap = c > 20 ? 2 : 1, changed = changes(), size = c - 2 * gap;
  for (let block = 0; block < BLOCKS; block++) {
    const [px, py] = placeOf(block), x = px + gap, y = py + gap, status = fold.status(block), number = colourNumber(block, mode), colour = colourOf(number);
    pen.globalAlpha = light && (status === "active" || status === "cached") && !light.has(block) ? 0.25 : 1;
    pen.lineWidth = 1; pen.strokeStyle = colours.line;
    if (status === "null" || status === "empty") {
      if (status === "null") { pen.fillStyle = colours.faint; pen.fillRect(x, y, size, size); label(pen, "×", x, y, size, colours.soft); }
      pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    } else if (status === "cached") {
      pen.fillStyle = number >= 0 && number < 8 ? colours.hatch[number] : hatchOf(colour);
      pen.fillRect(x, y, size, size);
      pen.strokeStyle = colour; pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    } else {
      const filled = fold.content[block] >= 0 ? 1 : Math.max(0, Math.min(1, (computedTokens(fold.owner[block], state.frame) - (fold.entry[block] & 0xffffff) * SIZE) / SIZE));
      const owners = mode === "request" && fold.refs[block] > 1 ? ownersOf(block, state.frame).slice(0, 4) : [null];
      owners.forEach((owner, i) => {
        const shade = owner === null ? colour : colours.lanes[tintOf(owner)], w = size / owners.length;
        pen.fillStyle = shade + "38"; pen.fillRect(x + i * w, y, w, size);
        pen.fillStyle = shade; pen.fillRect(x + i * w, y + size * (1 - filled), w, size * filled);
      });
      pen.strokeStyle = colour; pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      const ink = filled > 0.5 && number >= 0 && number < 8 ? colours.on[number] : filled > 0.5 ? (luminance(colour) > 0.36 ? "#000" : "#fff") : colours.ink;
      if (fold.content[block] >= 0) {
        const notch = Math.max(4, size * 0.27);
        pen.fillStyle = colours.surface; triangle(pen, x + size, y, notch + 1.5);
        pen.fillStyle = colours.ink; triangle(pen, x + size, y, notch);
      }
      if (fold.refs[block] > 1 && c >= 13) badge(pen, String(fold.refs[block]), x, y, size);
      else if (c >= 30) label(pen, String(block), x, y, size, ink);
    }
    const change = changed.get(block);
    if (change === "new" || change === "gone") {
      pen.globalAlpha = 1; pen.strokeStyle = colours.ink; pen.lineWidth = 2;
      pen.setLineDash(change === "gone" ? [3, 3] : []);
      pen.strokeRect(x, y, size, size); pen.setLineDash([]);
    }
  }
}
const hatches = new Map();
function hatchOf(colour) { if (!hatches.has(colour)) hatches.set(colour, hatch(colour)); return hatches.get(colour); }
function triangle(pen, x, y, size) { pen.beginPath(); pen.moveTo(x - size, y); pen.lineTo(x, y); pen.lineTo(x, y + size); pen.fill(); }
function label(pen, text, x, y, size, colour) {
  pen.fillStyle = colour; pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillText(text, x + size / 2, y + size / 2 + 1);
}
function badge(pen, text, x, y, size) {  // the reference count, readable on any stripes
  const tall = Math.min(size, 15), wide = Math.min(size, 6 + 7 * text.length);
  pen.fillStyle = colours.surface; pen.fillRect(x + (size - wide) / 2, y + (size - tall) / 2, wide, tall);
  pen.font = "bold 11px system-ui, 'DejaVu Sans', sans-serif";
  label(pen, text, x, y, size, colours.ink);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
}

// Blocks too small for rectangles are written as pixels. Cached ones fill half of a cell.
function drawDots(pen, mode, light) {
  const scale = window.devicePixelRatio || 1, c = Math.max(2, Math.round(pool.cell * scale)), wide = pool.columns * c, tall = pool.rows * c;
  const image = pen.createImageData(wide, tall), to = new Uint32Array(image.data.buffer), { refs, content } = fold;
  const shades = Array.from({ length: 25 }, (_, i) => pixel(colourOf(i - 1))), dim = Array.from({ length: 25 }, (_, i) => pixel(mix(colourOf(i - 1), colours.surface, 0.75)));
  const empty = pixel(colours.faint), body = c > 3 ? c - 1 : c;
  for (let block = 1; block < BLOCKS; block++) {
    const isActive = refs[block] > 0, isCached = !isActive && content[block] >= 0;
    const shade = !isActive && !isCached ? empty : (light && !light.has(block) ? dim : shades)[colourNumber(block, mode) + 1];
    let at = Math.floor(block / pool.columns) * c * wide + (block % pool.columns) * c;
    for (let y = 0; y < body; y++, at += wide) {
      for (let x = 0; x < body; x++) to[at + x] = isCached && (x + y) % 2 ? empty : shade;
    }
  }
  pen.putImageData(image, 0, 0);
}

const tierPlace = (tier, slot, width) => [70 + ((slot + 0.5) / (TIERS[tier][1] + 1)) * (width - 80), pool.top + tier * pool.strip + 9];
function drawTiers(pen, width) {
  TIERS.forEach(([name, most], tier) => {
    const y = pool.top + tier * pool.strip, used = D[`tier:${name}`][state.frame], [x0] = tierPlace(tier, -0.5, width), [x1] = tierPlace(tier, most + 0.5, width);
    pen.fillStyle = colours.soft; pen.textAlign = "left"; pen.textBaseline = "middle";
    pen.fillText(`${short(name, 5)} ${used}`, 0, y + 9);
    pen.fillStyle = colours.faint; pen.fillRect(x0, y + 2, x1 - x0, 14);
    pen.fillStyle = hatchOf(colours.soft); pen.fillRect(x0, y + 2, ((x1 - x0) * Math.min(used, most)) / most, 14);
    pen.strokeStyle = colours.line; pen.lineWidth = 1; pen.strokeRect(x0 + 0.5, y + 2.5, x1 - x0 - 1, 13);
  });
}
const MOST_ARROWS = 60;
function drawArrows(pen, width) {
  const centre = (block) => placeOf(block).map((v) => v + pool.cell / 2);
  const copies = copiesAt(state.frame), moves = movesAt(state.frame);
  for (const [from, to] of copies.slice(0, MOST_ARROWS)) arrow(pen, centre(from), centre(to), colours.ink, []);
  for (const [tier, isLoad, block, slot] of moves.slice(0, MOST_ARROWS)) {
    const ends = [centre(block), tierPlace(tier, slot, width)];
    arrow(pen, ...(isLoad ? ends.reverse() : ends), isLoad ? colours.accent : colours.soft, isLoad ? [] : [4, 3]);
  }
}
function arrow(pen, [x0, y0], [x1, y1], colour, dash) {
  const bend = Math.min(40, Math.hypot(x1 - x0, y1 - y0) / 4), mx = (x0 + x1) / 2, my = (y0 + y1) / 2 - bend;
  for (const [style, wide] of [[colours.surface, 4], [colour, 2]]) {
    pen.strokeStyle = style; pen.lineWidth = wide; pen.setLineDash(dash);
    pen.beginPath(); pen.moveTo(x0, y0); pen.quadraticCurveTo(mx, my, x1, y1); pen.stroke();
  }
  pen.setLineDash([]);
  const turn = Math.atan2(y1 - my, x1 - mx);
  pen.fillStyle = colour; pen.beginPath(); pen.moveTo(x1, y1);
  for (const side of [-0.45, 0.45]) pen.lineTo(x1 - 9 * Math.cos(turn + side), y1 - 9 * Math.sin(turn + side));
  pen.fill();
}
function slices(column, width, frame) {  // rows of a column whose first number is the frame
  const found = [], count = column.length / width;
  let low = 0, high = count;
  while (low < high) { const mid = (low + high) >> 1; if (column[width * mid] < frame) low = mid + 1; else high = mid; }
  for (; low < count && column[width * low] === frame; low++) found.push(Array.from(column.subarray(width * low + 1, width * (low + 1))));
  return found;
}
const copiesAt = (frame) => slices(D.copies, 3, frame);
const movesAt = (frame) => slices(D.moves, 5, frame);

// --- text ----------------------------------------------------------------------------------------

function marksAt(frame) {  // marks are in order of frames
  let low = 0, high = M.marks.length;
  while (low < high) { const mid = (low + high) >> 1; if (M.marks[mid][0] < frame) low = mid + 1; else high = mid; }
  const found = [];
  for (; low < M.marks.length && M.marks[low][0] === frame; low++) found.push(M.marks[low]);
  return found;
}
function describeMark([, what, lane, number, text], subject = `request ${nameOf(lane)}`) {
  switch (what) {
    case "admitted": return `${subject} is admitted` + (number ? `; ${plural(number, "token")} of it ${number === 1 ? "was" : "were"} cached` : "; none of its tokens was cached");
    case "preempted": return `${subject} is preempted: ${text}; ${plural(number, "computed token")} ${number === 1 ? "is" : "are"} lost`;
    case "loaded": return `${subject}: ${plural(number, "block")} loaded from a tier`;
    case "forked": return `${subject} is forked` + (number >= 0 ? ` from request ${nameOf(number)}` : "");
    case "error": return `${subject}: ${text}`;
    default: return `${subject} has finished (${text}) after ${plural(number, "output token")}`;
  }
}
function describeStep(frame) {
  const lines = [], ms = PARTS.reduce((sum, name) => sum + D[name][frame], 0) / 1000;
  const tokens = [D.prefill[frame] && `${plural(D.prefill[frame], "prefill token")}`, D.decode[frame] && `${plural(D.decode[frame], "decode token")}`].filter(Boolean);
  lines.push(`${tokens.join(" and ") || "no tokens"}; ${plural(D.running[frame], "sequence")} running, ${D.waiting[frame]} waiting`);
  lines.push(`${ms.toFixed(ms < 10 ? 2 : 0)} ms: ` + PARTS.filter((name) => D[name][frame] > 0).map((name) => `${name} ${(D[name][frame] / 1000).toFixed(2)}`).join(", "));
  for (const mark of marksAt(frame).slice(0, 12)) lines.push(describeMark(mark));
  const counts = [0, 0, 0, 0];
  for (let e = D.eventsOf[frame]; e < D.eventsOf[frame + 1]; e++) counts[kindOf(e)]++;
  const events = [["block allocated or shared", "blocks allocated or shared"], ["released", "released"], ["indexed", "indexed"], ["evicted", "evicted"]].map(([one, many], i) => counts[i] && plural(counts[i], one, many)).filter(Boolean);
  if (events.length) lines.push(events.join(", "));
  for (const [from, to] of copiesAt(frame).slice(0, 5)) lines.push(`block ${from} is copied to ${to} (copy-on-write)`);
  const moves = movesAt(frame);
  TIERS.forEach(([name], tier) => {
    const of = (load) => moves.filter((move) => move[0] === tier && move[1] === load).length;
    if (of(1)) lines.push(`${plural(of(1), "block")} loaded from ${name}`);
    if (of(0)) lines.push(`${plural(of(0), "block")} stored to ${name}`);
  });
  const waits = M.waits.length ? M.waits[lastAtMost(M.waitFrames, frame)]?.[1] ?? [] : [];
  for (const [lane, reason] of waits.slice(0, 4)) lines.push(`request ${nameOf(lane)} waits for ${WAIT_REASONS[reason] ?? reason}`);
  for (const text of (notesOf.get(frame) ?? []).slice(0, 8)) lines.push(text);
  return lines;
}

// The history of a block: [frame, text], in order.
function blockHistory(block) {
  const events = [], { starts, order } = byBlock;
  let refs = 0, content = -1;
  for (let i = starts[block]; i < starts[block + 1]; i++) {
    const e = order[i], kind = kindOf(e), user = laneOf(e) >= 0 ? `request ${nameOf(laneOf(e))}` : "", frame = frameOfEvent(e);
    if (kind === TAKE) {
      const entry = `entry ${entryOf(e)} of its table`;
      events.push([frame, refs ? `shared with ${user}, ${entry}` : content >= 0 ? `reused from the prefix cache by ${user}, ${entry}` : `allocated by ${user}, ${entry}`, laneOf(e)]);
      refs++;
    } else if (kind === DROP) {
      refs--;
      events.push([frame, refs ? `released by ${user}; ${refs} still ${refs === 1 ? "uses" : "use"} it` : content >= 0 ? `released by ${user}; it stays cached` : `released by ${user}; it is empty`, laneOf(e)]);
    } else if (kind === INDEX) {
      content = argumentOf(e);
      events.push([frame, "indexed: requests with this prefix can reuse it from now on", laneOf(e)]);
    } else {
      content = -1;
      events.push([frame, "evicted", -1]);
    }
  }
  for (let i = 0; i < D.copies.length; i += 3) {
    if (D.copies[i + 1] === block) events.push([D.copies[i], `copied to block ${D.copies[i + 2]}`, -1]);
    if (D.copies[i + 2] === block) events.push([D.copies[i], `a copy of block ${D.copies[i + 1]} (copy-on-write)`, -1]);
  }
  for (let i = 0; i < D.moves.length; i += 5) {
    if (D.moves[i + 3] === block) events.push([D.moves[i], `${D.moves[i + 2] ? "loaded from" : "stored to"} ${TIERS[D.moves[i + 1]][0]}`, -1]);
  }
  return events.sort((one, other) => one[0] - other[0]);
}
function describeBlock(block) {
  const status = fold.status(block);
  if (status === "null") return "the null block: a placeholder for blocks that a sliding window has dropped";
  if (status === "empty") return "empty";
  if (status === "cached") return "cached: not in use, but requests with this prefix can reuse it";
  const owners = ownersOf(block, state.frame);
  return `in use by ${owners.length > 1 ? "requests" : "request"} ${owners.slice(0, 4).map(nameOf).join(", ")}${owners.length > 4 ? ` and ${owners.length - 4} more` : ""}` + (fold.content[block] >= 0 ? "; full and indexed" : "; not full, or not indexed");
}
function blockText(block) {  // the tokens whose keys and values it holds
  const lane = fold.owner[block], entry = (fold.entry[block] & 0xffffff) * SIZE;
  if (lane < 0 || lane >= LANES.length || fold.status(block) === "empty" || !D.tokens.length) return "";
  const to = fold.content[block] >= 0 ? entry + SIZE : Math.min(entry + SIZE, computedTokens(lane, state.frame));
  return textOf(lane, entry, Math.min(Math.max(to, entry), D.tokensOf[lane + 1] - D.tokensOf[lane]));
}
function describeLane(lane, frame) {
  const span = spanAt(lane, frame), info = LANES[lane];
  if (!span) return info.ended >= 0 && frame > info.ended ? `has finished (${info.reason})` : "has not arrived yet";
  const [from, to, kind, computed] = span;
  if (kind === WAITING) return `has waited for ${plural(frame - from + 1, "step")}`;
  if (kind === PREEMPTED) return `was preempted, and has waited for ${plural(frame - from + 1, "step")}`;
  if (kind === PREFILL) return `prefills up to token ${computed}`;
  return kind === DECODE ? `decodes; ${plural(Math.max(knownTokens(lane, frame) - info.prompt, 0), "token")} so far` : "is running, but computes nothing in this step";
}
// A request's lines of `nanoengine explain`: [frame, text]; outside the page: -1 or FRAMES.
function requestHistory(lane) {
  return (requestLinesOf.get(LANES[lane].id) ?? []).map(([step, text]) => [step < stepNumber(0) ? -1 : step > stepNumber(FRAMES - 1) ? FRAMES : frameOfStep(step), text]);
}

// --- cards ---------------------------------------------------------------------------------------

// An element with text and children; text is never parsed as HTML.
function make(tag, options = {}, ...children) {
  const element = document.createElement(tag), { text, on, ...rest } = options;
  if (text !== undefined) element.textContent = text;
  if (on) element.addEventListener("click", on);
  Object.assign(element, rest);
  element.append(...children);
  return element;
}
const goTo = (frame) => (frame < 0 || frame >= FRAMES ? make("span", { text: frame < 0 ? "before" : "after" }) : make("button", { className: "go", text: `step ${stepNumber(frame)}`, on: () => setFrame(frame) }));
const closer = () => make("button", { className: "close", text: "✕", title: "Clear the selection (Esc)", ariaLabel: "Clear the selection", on: () => choose(-1, -1) });
function historyList(entries) {
  const list = make("ol", { className: "life" }), around = Math.max(entries.findIndex(([frame]) => frame > state.frame), 0);
  const from = Math.max(0, Math.min(around - 150, entries.length - 300));
  if (from) list.append(make("li", { text: `${from} earlier events are not shown` }));
  for (const [frame, text] of entries.slice(from, from + 300)) {
    list.append(make("li", { className: frame === state.frame ? "past now-row" : frame < state.frame ? "past" : "to-come" }, make("span", {}, goTo(frame)), make("span", { text })));
  }
  if (entries.length > from + 300) list.append(make("li", { text: `${entries.length - from - 300} later events are not shown` }));
  return list;
}
function definition(entries) {
  return make("dl", {}, ...entries.filter(([, value]) => value !== undefined && value !== "").flatMap(([name, value]) => [make("dt", { text: name }), typeof value === "string" ? make("dd", { text: value }) : make("dd", {}, value)]));
}
function chosenCard() {
  if (state.block >= 0) {
    const block = state.block, text = blockText(block), content = fold.content[block];
    const buttons = make("span", { className: "chips" }, ...ownersOf(block, state.frame).slice(0, 24).map((lane) => make("button", { className: "to", text: nameOf(lane), on: () => choose(lane, -1, true) })));
    return [closer(), make("h3", { text: `Block ${block}` }), make("p", { text: describeBlock(block) }),
      definition([["references", String(fold.refs[block])], ["users", fold.refs[block] ? buttons : ""], ["content", content >= 0 ? `number ${content}, prefix ${D.rootOf[content]}` : "not indexed"]]),
      ...(text ? [make("p", { className: "text", text })] : []), make("h3", { text: "History of the block" }), historyList(blockHistory(block))];
  }
  if (state.lane >= 0) {
    const lane = state.lane, info = LANES[lane], tables = tablesOf(lane, state.frame), known = D.tokens.length ? knownTokens(lane, state.frame) : 0;
    const prompt = Math.min(info.prompt, D.tokensOf[lane + 1] - D.tokensOf[lane]), text = make("p", { className: "text", text: textOf(lane, 0, prompt) });
    if (known > prompt) text.append(make("mark", { text: textOf(lane, prompt, known), title: "output so far" }));
    const parts = tables.flatMap((table, group) => (table.length ? [
      make("p", { className: "legend", text: (tables.length > 1 ? `Block table of group ${group}` : "Block table") + ": entry → block of the pool" }),
      make("div", { className: "chips" }, ...table.slice(0, 400).map((block, entry) => make("button", { className: "to", text: `${entry} → ${block || "×"}`, on: () => choose(lane, block, true) })))] : []));
    return [closer(), make("h3", { text: `Request ${nameOf(lane)}` }), make("p", { text: `At step ${stepNumber(state.frame)} it ${describeLane(lane, state.frame)}.` }),
      ...parts, ...(D.tokens.length ? [text] : []), make("h3", { text: "History of the request" }), historyList(requestHistory(lane))];
  }
  return [make("h3", { text: "Summary of the run" }), make("ul", {}, ...M.runLines.slice(1).map((text) => make("li", { text: text.replace(/^\d+\. /, "") }))),
    make("p", { className: "legend", text: "Select a request or a block to see its history here." })];
}
let cardTimer = 0;
function drawCards() {
  cardTimer = 0;
  $("step-words").replaceChildren(...describeStep(state.frame).map((text) => make("li", { text })));
  $("chosen").replaceChildren(...chosenCard());
  const list = $("chosen").querySelector(".life"), past = list?.querySelectorAll(".past");
  if (past?.length) list.scrollTop = past[past.length - 1].offsetTop - list.offsetTop - list.clientHeight / 2;
  for (const chart of charts) {
    const values = chart.series.map(([label, values]) => [label, values[state.frame]]);
    chart.caption.replaceChildren(chart.title, ...values.flatMap(([label, value], i) => [" ", make("span", { className: "key" }, swatch(i), `${label} `, make("b", { text: value === null ? "–" : `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 })} ${chart.unit}` }))]));
  }
}
function swatch(i) {
  const mark = make("i", { className: "sw" });
  Object.assign(mark.style, { height: "0", borderTop: `3px ${i ? "dashed" : "solid"} var(--c${i})`, verticalAlign: ".28em" });
  return mark;
}
function drawStep() {
  $("slider").value = state.frame;
  $("slider").setAttribute("aria-valuetext", `step ${stepNumber(state.frame)}`);
  const number = stepNumber(state.frame).toLocaleString("en");
  $("now").textContent = `step ${number} of ${stepNumber(FRAMES - 1).toLocaleString("en")} · ${(D.t[state.frame] / 1e4).toFixed(2)} s`;
  $("pool-step").textContent = number;
  const f = state.frame, usable = USABLE, empty = usable - D.active[f] - D.cached[f], unused = USABLE - (BLOCKS - 1);
  $("pool-words").replaceChildren(make("b", { text: D.active[f].toLocaleString("en") }), ` in use (${percent(D.active[f], usable)}), `,
    make("b", { text: D.cached[f].toLocaleString("en") }), " cached, ", make("b", { text: empty.toLocaleString("en") }), ` empty; ${plural(SIZE, "token")} per block. ${unused ? `The last ${unused.toLocaleString("en")} are never used and not drawn. ` : ""}${MODES[$("colour").value]}`);
  moveCursors(); drawPool();
  // During playback, text is updated ten times per second, because faster text is unreadable.
  if (!state.playing) drawCards(); else if (!cardTimer) cardTimer = setTimeout(drawCards, 100);
  writeHash();
}

// --- pointers ------------------------------------------------------------------------------------

function showTip(lines, x, y) {
  const tip = $("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join("\n");
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? Math.max(4, x - width - 14) : x + 14, top = y + 14 + height > innerHeight ? Math.max(4, y - height - 14) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}
function blockAt(event) {
  const box = $("pool").querySelector("canvas").getBoundingClientRect(), x = Math.floor((event.clientX - box.left) / pool.cell), y = Math.floor((event.clientY - box.top) / pool.cell), block = y * pool.columns + x;
  return x >= 0 && x < pool.columns && y >= 0 && y < pool.rows && block < BLOCKS ? block : -1;
}
function blockTip(block) {
  const life = blockHistory(block), text = blockText(block), before = life.filter(([frame]) => frame <= state.frame), later = life.length - before.length;
  return [`Block ${block}: ${describeBlock(block)}`, ...(fold.refs[block] > 1 ? [`${fold.refs[block]} references`] : []), ...(text ? [`“${text.length > 140 ? text.slice(0, 140) + "…" : text}”`] : []), "",
    ...(before.length > 8 ? [`… ${before.length - 8} earlier events`] : []), ...before.slice(-8).map(([frame, text]) => `step ${stepNumber(frame)}: ${text}`), ...(later ? [`… ${later} more after this step`] : [])];
}
function laneTip(lane, frame) {
  const story = requestHistory(lane), shownLines = story.length > 12 ? [...story.slice(0, 5), [-2, `… ${story.length - 10} more`], ...story.slice(-5)] : story;
  return [`Request ${nameOf(lane)} ${describeLane(lane, Math.max(0, Math.min(FRAMES - 1, frame)))}`, "", ...shownLines.map(([at, text]) => (at < 0 || at >= FRAMES ? text : `step ${stepNumber(at)}: ${text}`))];
}
const laneAt = (event) => {
  const y = event.clientY - $("lanes").getBoundingClientRect().top + $("lanes").scrollTop;
  return shown[Math.floor(y / LANE)] ?? -1;
};
function listenToPointers() {
  let pending = null;  // Hovering is looked at once a frame.
  const hover = (lines, event) => {
    if (event.pointerType === "touch") return;
    const isFirst = !pending;
    pending = [lines, event.clientX, event.clientY];
    if (isFirst) requestAnimationFrame(() => { const [make, x, y] = pending; pending = null; showTip(make(), x, y); });
  };
  const leave = () => { pending = pending && [() => null, 0, 0]; showTip(null); };
  const poolBox = $("pool");
  poolBox.addEventListener("pointermove", (event) => { const block = blockAt(event); hover(() => (block < 0 ? null : blockTip(block)), event); });
  poolBox.addEventListener("pointerleave", leave);
  poolBox.addEventListener("click", (event) => { const block = blockAt(event); if (block >= 0) choose(state.lane, block); });
  for (const track of document.querySelectorAll(".track")) {
    const isLanes = track.dataset.track === "lanes", area = isLanes ? $("lanes") : track;
    const at = (event) => frameAt(event.clientX - area.getBoundingClientRect().left, area.clientWidth);
    const within = (frame) => Math.max(0, Math.min(FRAMES - 1, frame));
    area.addEventListener("pointermove", (event) => {
      if (event.buttons & 1 && !isLanes) return setFrame(within(at(event)));
      const lane = isLanes ? laneAt(event) : -1, frame = within(at(event));
      hover(() => (isLanes ? (lane < 0 ? null : laneTip(lane, frame)) : [`Step ${stepNumber(frame)}`, ...describeStep(frame)]), event);
    });
    area.addEventListener("pointerleave", leave);
    area.addEventListener("click", (event) => {
      const x = event.clientX - area.getBoundingClientRect().left;
      if (isLanes && laneAt(event) >= 0) choose(laneAt(event), -1);
      if (x >= gutter && !(isLanes && x > area.clientWidth)) setFrame(within(at(event)));
    });
  }
}

// --- keys, play, search --------------------------------------------------------------------------

let played = 0, lastTime = 0;
function play(on) {
  state.playing = on;
  $("play").textContent = on ? "⏸ Stop" : "▶ Play";
  $("play").setAttribute("aria-pressed", String(on));
  if (!on) return drawCards();
  if (state.frame >= FRAMES - 1) setFrame(0);
  played = state.frame; lastTime = performance.now();
  requestAnimationFrame(tick);
}
function tick(time) {
  if (!state.playing) return;
  played += (Math.max(0, Math.min(time - lastTime, 250)) / 1000) * Number($("speed").value);
  lastTime = time;
  if (Math.floor(played) !== state.frame) {
    setFrame(Math.floor(played));
    followLanes();
  }
  if (state.frame >= FRAMES - 1) return play(false);
  requestAnimationFrame(tick);
}
function followLanes() {  // Scrolls to those that run now, if none of them is in sight.
  const box = $("lanes"), top = Math.floor(box.scrollTop / LANE), fits = Math.floor(box.clientHeight / LANE);
  const runs = (lane) => { const span = spanAt(lane, state.frame); return span && span[2] !== WAITING; };
  if (shown.length <= fits || shown.slice(top, top + fits).some(runs)) return;
  const first = shown.findIndex(runs);
  if (first >= 0) box.scrollTop = first * LANE;
}
function say(text) { $("live").textContent = text; }

function listenToKeys() {
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 0, ArrowDown: 0 };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || $("keys").open) return;
    const target = event.target, isField = target.matches("input, select");
    if (event.key === "Escape") { if (!$("found").hidden) closeFound(); else choose(-1, -1); $("search").blur(); showTip(null); return; }
    if (isField && target.id !== "slider") return;
    if (target.id === "pool" && (event.key in moves || event.key === "Enter")) {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -pool.columns, ArrowDown: pool.columns }[event.key] ?? 0;
      const block = state.block < 0 ? 0 : Math.max(0, Math.min(BLOCKS - 1, state.block + by));
      choose(state.lane, block, event.key === "Enter");
      if (event.key !== "Enter") $("box").scrollIntoView({ block: "nearest" });
      say(`Block ${block}: ${describeBlock(block)}`);
    } else if (target.id === "lanes" && (event.key === "ArrowUp" || event.key === "ArrowDown" || event.key === "Enter")) {
      const at = shown.indexOf(state.lane), next = Math.max(0, Math.min(shown.length - 1, at + { ArrowUp: -1, ArrowDown: 1, Enter: 0 }[event.key]));
      if (!shown.length) return;
      const box = $("lanes"), y = next * LANE;
      if (y < box.scrollTop) box.scrollTop = y; else if (y + LANE > box.scrollTop + box.clientHeight) box.scrollTop = y + LANE - box.clientHeight;
      choose(shown[next], -1, event.key === "Enter");
      say(`Request ${nameOf(shown[next])} ${describeLane(shown[next], state.frame)}`);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      setFrame(state.frame + moves[event.key] * (event.shiftKey ? 10 : 1)); say(describeStep(state.frame).slice(0, 1).join());
    } else if (event.key === "Home") setFrame(0);
    else if (event.key === "End") setFrame(FRAMES - 1);
    else if (event.key === " " && !target.matches("button, summary")) play(!state.playing);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-" || event.key === "−") zoom(2);
    else if (event.key === "0") setView(0, FRAMES);
    else if (event.key === "/") $("search").focus();
    else if (event.key === "?") $("keys").showModal();
    else return;
    event.preventDefault();
  });
}
function listenToControls() {
  const on = (id, what, action) => $(id).addEventListener(what, action);
  on("first", "click", () => setFrame(0)); on("last", "click", () => setFrame(FRAMES - 1));
  on("back", "click", () => setFrame(state.frame - 1)); on("forward", "click", () => setFrame(state.frame + 1));
  on("play", "click", () => play(!state.playing));
  on("slider", "input", () => { setFrame(Number($("slider").value)); played = state.frame; });
  on("colour", "change", drawStep);
  on("in", "click", () => zoom(0.5)); on("out", "click", () => zoom(2)); on("all", "click", () => setView(0, FRAMES));
  on("help", "click", () => $("keys").showModal());
  on("unfilter", "click", () => showOnly(null, ""));
  on("lanes", "scroll", drawLanes);
  on("search", "input", find); on("search", "focus", find);
  on("search", "keydown", (event) => {
    const first = $("found").querySelector("button");
    if (event.key === "Enter" && first) first.click();
    if (event.key === "ArrowDown" && first) { first.focus(); event.preventDefault(); }
  });
  on("found", "keydown", (event) => {
    const item = event.target.closest("li"), next = { ArrowDown: item?.nextElementSibling, ArrowUp: item?.previousElementSibling }[event.key];
    if (event.key in { ArrowDown: 1, ArrowUp: 1 }) { (next?.querySelector("button") ?? $("search")).focus(); event.preventDefault(); event.stopPropagation(); }
  });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".find")) closeFound(); });
  document.addEventListener("focusin", (event) => { if (!event.target.closest(".find")) closeFound(); });
  window.addEventListener("hashchange", readHash);
  $("lanes").style.height = LANES.length * LANE < $("lanes").clientHeight ? `${Math.max(LANES.length, 3) * LANE + 4}px` : "";
  const redraw = () => { layoutPool(); drawTracks(); drawStep(); };
  new ResizeObserver(redraw).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); hatches.clear(); redraw(); });
}
function closeFound() { $("found").hidden = true; }

const prompts = [];
const promptOf = (lane) => (prompts[lane] ??= textOf(lane, 0, Math.min(LANES[lane].prompt, 400, D.tokensOf[lane + 1] - D.tokensOf[lane])).toLowerCase());
function find() {
  const query = $("search").value.trim(), low = query.toLowerCase(), list = $("found"), results = [];
  list.replaceChildren();
  list.hidden = !query;
  if (!query) return;
  const number = /^(block|step)\s+(\d+)$/.exec(low);
  if (number && number[1] === "block" && number[2] < BLOCKS) results.push([`block ${number[2]}`, () => choose(-1, Number(number[2]), true)]);
  if (number && number[1] === "step") results.push([`step ${stepNumber(frameOfStep(Number(number[2])))}`, () => setFrame(frameOfStep(Number(number[2])))]);
  const ids = [], begin = [], within = [];
  for (const lane of laneOrder) {
    if (nameOf(lane).toLowerCase().includes(low)) ids.push(lane);
    else if (D.tokens.length && promptOf(lane).trimStart().startsWith(low)) begin.push(lane);
    else if (D.tokens.length && promptOf(lane).includes(low)) within.push(lane);
  }
  const exact = ids.filter((lane) => LANES[lane].id.toLowerCase() === low);
  for (const [lanes, text] of [[begin, `prompts that begin with “${query}”`], [within, `prompts with “${query}”`]]) {
    if (lanes.length > 1) results.push([`only ${plural(lanes.length, "sequence")}: ${text}`, () => showOnly(new Set(lanes), text)]);
  }
  for (const lane of [...exact, ...ids.filter((lane) => !exact.includes(lane)), ...begin, ...within].slice(0, 14)) {
    results.push([`${nameOf(lane)}  ·  ${promptOf(lane).slice(0, 60)}`, () => jumpTo(lane)]);
  }
  for (const [text, go] of results) list.append(make("li", {}, make("button", { text, on: () => { closeFound(); go(); } })));
  if (!results.length) list.append(make("li", { className: "none", text: "nothing found" }));
}
function jumpTo(lane) {
  if (state.only && !state.only.has(lane)) showOnly(null, "");
  const first = D.spansOf[lane] < D.spansOf[lane + 1] ? D.spans[D.spansOf[lane]] : 0;
  if (!spanAt(lane, state.frame)) setFrame(first);
  const row = shown.indexOf(lane);
  if (row >= 0) $("lanes").scrollTop = Math.max(0, row * LANE - $("lanes").clientHeight / 2);
  choose(lane, -1, true);
}

// --- start ---------------------------------------------------------------------------------------

function tellAbout() {
  const model = M.header.model.model_name, seconds = D.t[FRAMES - 1] / 1e4, out = D.sampled.reduce((sum, n) => sum + n, 0);
  $("title").textContent = M.title;
  $("engine").textContent = `Traced by nanoengine ${M.header.engine}, ${M.header.date}.`;
  const facts = [[new Set(LANES.map((lane) => lane.id)).size, "requests"], [stepNumber(FRAMES - 1) - stepNumber(0) + 1, "steps"], [`${seconds.toFixed(2)} s`, ""], [out, "tokens sampled"], [USABLE, `blocks of ${SIZE} tokens`],
    [percent(D.hit[FRAMES - 1], D.queried[FRAMES - 1]), "of prompts found in the cache"], [M.marks.filter(([, what]) => what === "preempted").length, "preemptions"]];
  $("about").replaceChildren(model ? `${model.split("/").pop()}: ` : "", ...facts.flatMap(([value, label], i) => [i ? " · " : "", make("b", { text: typeof value === "number" ? value.toLocaleString("en") : value }), ` ${label}`]));
  $("thinned").replaceChildren(...M.thinned.map((text) => make("li", { text })));
  $("parts").replaceChildren(...PARTS.map((name, i) => [name, [5, 4, 3, 0, 2, 1][i]]).map(([name, i]) => { const mark = make("i", { className: "sw" }); mark.style.background = `var(--c${i})`; return make("span", { className: "key" }, mark, name); }));
}
async function start() {
  ({ meta: M, columns: D } = await unpack());
  LANES = M.lanes; FRAMES = M.frames; SIZE = M.header.blockSize; USABLE = M.header.numBlocks - 1; TIERS = M.header.tiers;
  BLOCKS = 2;  // the null block and one more, however little was used
  for (let e = 0; e < D.events.length / 3; e++) BLOCKS = Math.max(BLOCKS, blockOf(e) + 1);
  M.waitFrames = M.waits.map(([frame]) => frame);
  notesOf = new Map();
  requestLinesOf = new Map(M.requestLines);
  for (const [frame, text] of M.notes) notesOf.set(frame, [...(notesOf.get(frame) ?? []), text]);
  marksOf = LANES.map(() => []);
  for (const mark of M.marks) marksOf[mark[2]]?.push(mark);
  const firstOf = new Map();
  LANES.forEach((lane, i) => { if (!firstOf.has(lane.id)) firstOf.set(lane.id, i); });
  laneOrder = LANES.map((_, i) => i).sort((one, other) => firstOf.get(LANES[one].id) - firstOf.get(LANES[other].id) || one - other);
  laneOrder.forEach((lane, i) => { tints[lane] = i % 8; });
  byBlock = grouped(BLOCKS, blockOf);
  byLane = grouped(LANES.length, (e) => (kindOf(e) < INDEX ? laneOf(e) : -1));
  fold = new Fold();
  $("slider").max = FRAMES - 1;
  readColours(); tellAbout(); makeCurves(); layoutPool();
  state.view = [0, FRAMES];
  listenToPointers(); listenToKeys(); listenToControls();
  fold.seek(0); drawTracks(); readHash();
  document.documentElement.dataset.ready = "yes";
  window.viewer = { state, fold, pool, lanes: LANES, setFrame, tablesOf, knownTokens, textOf, blockHistory, requestHistory };  // for tests and the curious
}
start().catch((error) => {
  $("about").textContent = `This page can't show its data: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
