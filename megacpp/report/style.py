"""Style sheet of a report and its small script; the page is complete without the script."""

from __future__ import annotations

SERIES = 8  # colours
SMOOTH = 0.8  # weight of earlier points in a smoothed line

COLOURS = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #5f676d; --paper: #fff; --rule: #e3e6e8;
  --soft: #f5f6f7; --c0: #2f6fde; --c1: #d9661f; --c2: #1f8f5f; --c3: #9b59c4; --c4: #d14a5c;
  --c5: #0f8a97; --c6: #94700f; --c7: #6b7682; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --dim: #9aa4ac; --paper: #14171a;
  --rule: #2c3238; --soft: #1c2024; --c0: #6ea3ff; --c1: #f59a57; --c2: #53c491; --c3: #c08be6;
  --c4: #f07b8a; --c5: #46c4d2; --c6: #d6b450; --c7: #98a4b0; } }
"""
TEXT = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .8rem; padding-top: .8rem;
  border-top: 1px solid var(--rule); }
p, li { margin: .3rem 0; } .dim { color: var(--dim); } code, pre { font-size: .85em; }
pre { background: var(--soft); padding: .7rem .9rem; margin: .3rem 0 1rem; white-space: pre-wrap;
  border-radius: 4px; max-height: 24rem; overflow-y: auto; }
.scroll { overflow-x: auto; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; } th { font-weight: 600; }
td:first-child { min-width: 6rem; }
.pairs td:first-child { width: 10rem; color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem 2.2rem; margin: 1.2rem 0; color: var(--dim);
  font-size: .85rem; }
.tiles b { display: block; font-size: 1.3rem; font-weight: 600; color: var(--ink);
  font-variant-numeric: tabular-nums; }
"""
DRAWN = """
.two { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.8rem 2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .4rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.axis { fill: var(--dim); } .note { fill: var(--ink); } .end { text-anchor: end; }
.middle { text-anchor: middle; } .grid { stroke: var(--rule); }
.level { stroke: var(--ink); stroke-dasharray: 4 3; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.raw { fill: none; stroke-width: 1; opacity: .28; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0;
  margin: .4rem 0 0; font-size: .82rem; color: var(--dim); }
.legend i { display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem;
  border-radius: 2px; }
.bar { display: grid; grid-template-columns: 11rem 1fr 11.5rem; gap: 0 .8rem; align-items: center;
  font-size: .85rem; padding: .2rem 0; font-variant-numeric: tabular-nums; }
.bar span:first-child { color: var(--dim); } .track { position: relative; display: block; }
.track u { display: block; position: relative; height: .5rem; margin: 1px 0; }
.track u.whole { height: .9rem; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 1px; }
.track b { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px dashed var(--ink); }
.stack { display: flex; height: 1.7rem; border-radius: 4px; overflow: hidden; }
.smooth { display: flex; align-items: center; gap: .6rem; font-size: .85rem; color: var(--dim); }
.smooth input { width: 10rem; accent-color: var(--c0); }
@media (max-width: 900px) { svg text { font-size: 14px; } }
@media (max-width: 640px) {
  .two { grid-template-columns: minmax(0, 1fr); }
  body { margin: 1rem auto; padding: 0 .9rem; }
  svg text { font-size: 15px; }
  .bar { grid-template-columns: 1fr auto; } .bar .track { grid-column: 1 / 3; grid-row: 2; }
  .pairs td { display: block; width: auto; } .pairs td:first-child { border: 0; padding-bottom: 0; }
}
@media print { .smooth { display: none; } }
"""
CSS = (
    COLOURS
    + TEXT
    + DRAWN
    + "".join(
        f".s{n} {{ fill: var(--c{n}); background: var(--c{n}); }} "
        f".line.s{n}, .raw.s{n} {{ fill: none; stroke: var(--c{n}); }}\n"
        for n in range(SERIES)
    )
)
# Smooths every line that has its raw values behind it, as `charts.smoothed` does.
SCRIPT = """
for (const box of document.querySelectorAll('.smooth')) {
  const [input, said] = [box.querySelector('input'), box.querySelector('output')];
  input.addEventListener('input', () => {
    const keep = +input.value;
    said.textContent = keep.toFixed(2);
    for (const raw of document.querySelectorAll('.raw')) {
      let sum = 0, weight = 0;
      const points = raw.getAttribute('points').split(' ').map(pair => {
        const [x, y] = pair.split(',');
        sum = keep * sum + (1 - keep) * y;
        weight = keep * weight + (1 - keep);
        return x + ',' + (sum / weight).toFixed(1);
      });
      raw.nextElementSibling.setAttribute('points', points.join(' '));
    }
  });
  box.hidden = false;
}
"""
SLIDER = (
    '<p class="smooth" hidden><label for="keep">smoothing</label><input id="keep" type="range" '
    f'min="0" max="0.99" step="0.01" value="{SMOOTH}"><output>{SMOOTH:.2f}</output></p>'
)
