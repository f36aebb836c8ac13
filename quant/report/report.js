// Draws the charts with Observable Plot, says what the pointer is on, sorts tables, filters layers, copies the command.
'use strict';
const css = colour => `var(--${colour})`;
const SYMBOLS = {
  c0: 'circle', c1: 'square', c2: 'triangle', c3: 'diamond', c4: 'wye', c5: 'cross', c6: 'star',
  kept: {draw: (path, size) => path.rect(-1, -size / 8, 2, size / 8)},
};
const HOVER = {stroke: css('ink'), strokeWidth: 2, fill: 'none'};

// Options that all charts share.
const frame = (chart, width, more) => ({
  className: 'plot', style: {fontSize: 12}, ariaLabel: chart.label, width, height: width < 640 ? 260 : 320,
  marginLeft: chart.log ? 66 : 48, marginRight: 16, marginTop: 12, marginBottom: 36, ...more,
});
// Scales of the colours and symbols of (name, colour).
const scales = (series, legend) => ({
  color: {domain: series.map(s => s[0]), range: series.map(s => css(s[1])), legend: legend === 'color'},
  symbol: {domain: series.map(s => s[0]), range: series.map(s => SYMBOLS[s[1]]), legend: legend === 'symbol'},
});
// Positions of (position, number) with a round number, as many as the width has room for.
function thinned(ticks, width) {
  const step = Math.max(1, d3.tickStep(0, ticks.length, width / 70));
  return ticks.filter(tick => tick[1] % step === 0).map(tick => tick[0]);
}
// A logarithmic axis shows powers of ten alone where it holds some; d3 chooses the ticks of shorter and longer ones.
function decades(low, high) {
  const powers = d3.range(Math.ceil(Math.log10(low)), Math.log10(high)).map(exponent => 10 ** exponent);
  return powers.length > 1 && powers.length < 10 ? powers : 6;
}

// Plot's pointer finds the nearest middle; bars and cells are found by their area.
function byArea(data, figure) {
  const find = event => { figure.value = event.target.matches('rect') ? data[d3.select(event.target).datum()] : null; };
  figure.addEventListener('pointermove', find);
  figure.addEventListener('pointerdown', find);
  return figure;
}

const DRAW = {
  dots(chart, width) {
    const heights = [...chart.points.map(point => point[1]), chart.limit?.y].filter(Number.isFinite);
    let [low = 1, high = 1] = d3.extent(heights.filter(y => !chart.log || y > 0));
    const pad = Math.max(0.08 * (high - low), chart.pad ?? 0) || 1;
    if (chart.log) [low, high] = [low / 1.5, high * 1.5];
    else [low, high] = d3.nice(low - pad, high + pad, 6);
    // What a logarithmic axis has no place for stands at its end: zero below, infinity above.
    const at = y => y === 'top' ? high : Math.max(y ?? low, low);
    const points = chart.points.map(([x, y, series, row]) => ({x, y: at(y), series, row}));
    const place = {x: 'x', y: 'y'}, middle = d3.mean(d3.extent(points, point => point.x));
    const names = new Map(chart.ticks), ticks = chart.ticks && thinned(chart.ticks, width);
    return [Plot.plot(frame(chart, width, {
      ...scales(chart.series, 'symbol'),
      x: {label: chart.x, labelArrow: 'none', ...(ticks
        ? {domain: [-0.5, d3.max(points, point => point.x) + 0.5], ticks, tickFormat: x => `${names.get(x)}`}
        : {inset: 20, nice: true, ticks: width / 70})},
      y: {
        type: chart.log ? 'log' : 'linear', domain: [low, high], label: null, grid: true, tickSize: 0, tickFormat: '~g',
        ticks: chart.log ? decades(low, high) : 6,
      },
      marks: [
        chart.limit && Plot[chart.limit.x ? 'ruleX' : 'ruleY'](Object.values(chart.limit), {strokeDasharray: '5 4'}),
        chart.curve && Plot.line(chart.curve, {stroke: css('c0'), strokeWidth: 2}),
        Plot.dot(points, {...place, fill: 'series', symbol: 'series', r: 4, fillOpacity: 0.85}),
        // Names of neighbours stand above and below their points in turn, and so do not cover each other.
        chart.labels?.map(([x, y, text], i) => Plot.text([text], {
          x: [x], y: [at(y)], fill: css('ink'), stroke: css('card'), strokeWidth: 4, dy: i % 2 ? 12 : -10,
          ...(x > middle ? {textAnchor: 'end', dx: -8} : {textAnchor: 'start', dx: 8}),
        })),
        Plot.dot(points, Plot[chart.column ? 'pointerX' : 'pointer']({...place, r: 7, ...HOVER})),
      ],
    }))];
  },

  bars(chart, width) {
    const parts = chart.parts.map(([bar, size, series, row]) => ({bar, size, series, row}));
    const stack = {x: 'size', y: 'bar', offset: chart.whole ? 'normalize' : null, fill: 'series', insetRight: 1, rx: 2};
    const title = {x: () => 0, y: '0', text: '1', textAnchor: 'start', dy: -24, fill: css('soft'), fontSize: 13};
    return [byArea(parts, Plot.plot(frame(chart, width, {
      ...scales(chart.series, 'color'), height: 62 * chart.bars.length, marginLeft: 0, marginRight: 0,
      marginTop: 4, marginBottom: 0,
      x: {axis: null},
      y: {axis: null, domain: chart.bars.map(bar => bar[0]), paddingInner: 0.55, paddingOuter: 0.45},
      marks: [
        Plot.barX(parts, Plot.stackX(stack)),
        Plot.text(chart.bars, title),
      ],
    })))];
  },

  heat(chart, width) {
    const look = getComputedStyle(document.documentElement), roles = new Map(chart.roles);
    const names = ['format', 'role', 'block', 'score', 'chosen', 'row'];
    const cells = chart.cells.map(cell => Object.fromEntries(d3.zip(names, cell)));
    const domain = d3.extent(cells.map(cell => cell.score).filter(score => score > 0));
    const blocks = [...new Set(cells.map(cell => cell.block))].filter(block => block !== null).sort(d3.ascending);
    const range = ['--cool', '--hot'].map(name => look.getPropertyValue(name).trim());
    const color = {type: 'log', domain, range, interpolate: 'lab', tickFormat: '~g'};
    const panels = chart.panels.map(([format, subtitle]) => {
      const found = cells.filter(cell => cell.format === format);
      const strokeWidth = width < 640 ? 1.2 : 2;
      const ring = {filter: 'chosen', stroke: css('ring'), strokeWidth, inset: 1, pointerEvents: 'none'};
      // A group outside the blocks, such as the head, takes a whole row.
      const both = options => [
        Plot.cell(found.map(cell => cell.block === null ? {} : cell), {x: 'block', y: 'role', rx: 1, ...options}),
        Plot.cell(found.map(cell => cell.block === null ? cell : {}), {y: 'role', rx: 1, ...options}),
      ];
      return byArea(found, Plot.plot(frame(chart, width, {
        subtitle, color, height: 36 + 22 * roles.size, padding: 0.04, marginTop: 0,
        marginLeft: 12 + 6.5 * d3.max(roles.values(), name => name.length),
        x: {label: chart.x, labelArrow: 'none', domain: blocks, ticks: thinned(d3.zip(blocks, blocks), width)},
        y: {label: null, domain: [...roles.keys()], tickFormat: role => roles.get(role), tickSize: 0},
        marks: [both({fill: cell => Math.max(cell.score, domain[0])}), both(ring)],
      })));
    });
    return [Plot.legend({color, className: 'plot', tickSize: 0, ticks: decades(...domain)}), ...panels];
  },
};

// Each image lies over the original, cut at the slider; without a script they stand next to each other.
for (const pair of document.querySelectorAll('.pair')) {
  const slider = pair.querySelector('input');
  pair.classList.add('slides');
  slider.addEventListener('input', () => pair.style.setProperty('--cut', `${slider.value}%`));
}

const tip = document.getElementById('tip');
// The tip repeats the row of the table. It is HTML, because Plot's own tips cut long names and leave a phone's screen.
function show(value, event) {
  tip.hidden = !value;
  if (!value) return;
  const row = document.getElementById(value.row), heads = row.closest('table').querySelectorAll('th');
  const [name, ...values] = [...row.cells].map(cell => cell.textContent);
  const facts = values.map((text, i) => `${heads[i + 1].textContent} ${text}`);
  const line = (tag, text) => Object.assign(document.createElement(tag), {textContent: text});
  const series = [undefined, name, ...values].includes(value.series) ? [] : [value.series];
  tip.replaceChildren(line('b', name), line('span', [...series, ...facts].join(' · ')));
  const above = event.clientY - tip.offsetHeight - 14;
  tip.style.left = `${Math.max(8, Math.min(event.clientX - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
}
function reveal(id) {
  const row = document.getElementById(id), fold = row.closest('details');
  document.querySelectorAll('tr.found').forEach(other => other.classList.remove('found'));
  if (fold) fold.open = true;
  row.hidden = false;
  row.classList.add('found');
  row.scrollIntoView({block: 'center'});
}
addEventListener('scroll', () => show(null), {passive: true});

const charts = [...document.querySelectorAll('.chart')].map(place => {
  const chart = JSON.parse(place.textContent);
  chart.label = `${place.closest('section').querySelector('h2').textContent}; the table below holds the values`;
  const pointed = () => [...place.children].map(figure => figure.value).find(Boolean);
  // Plot would keep its pointer where a mouse clicks; here a click leads to the row of the table.
  place.addEventListener('pointerdown', event => event.pointerType === 'mouse' && event.stopPropagation(), true);
  place.addEventListener('pointerdown', event => show(pointed(), event));
  place.addEventListener('pointermove', event => show(pointed(), event));
  place.addEventListener('pointerleave', event => event.pointerType === 'touch' || show(null));
  place.addEventListener('click', () => pointed() && matchMedia('(hover:hover)').matches && reveal(pointed().row));
  return () => place.replaceChildren(...DRAW[chart.kind](chart, place.clientWidth));
});
const draw = () => charts.forEach(chart => chart());
addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
draw();

document.querySelectorAll('a[href^="#"]').forEach(link => link.addEventListener('click', event => {
  event.preventDefault();
  reveal(link.hash.slice(1));
}));

// Sorting. A heading of a table of layers sorts all such tables with that column; a third click is the model's order.
const SIZES = {B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12};
function amount(text) {
  if (text === 'exact') return Infinity;
  const sizes = text.split(' × ').map(part => /^[-−+]?[\d,.]+(?:e[-+]?\d+)?/.exec(part)?.[0]);
  if (sizes.includes(undefined)) return NaN;
  const unit = SIZES[text.split(' ')[1]] ?? 1;
  return sizes.reduce((product, size) => product * Number(size.replace('−', '-').replaceAll(',', '')), unit);
}
function sortTable(table, name, direction) {
  const heads = [...table.tHead.rows[0].cells], column = heads.findIndex(head => head.textContent === name);
  if (column < 0) return;
  heads.forEach((head, i) => head.setAttribute('aria-sort', i === column ? direction : 'none'));
  const body = table.tBodies[0], rows = [...body.rows];
  rows.forEach((row, i) => { row.dataset.order ??= i; });
  const texts = new Map(rows.map(row => [row, row.cells[column].textContent]));
  const absent = text => text === '–' || text === '';
  const numeric = [...texts.values()].every(text => absent(text) || !Number.isNaN(amount(text)));
  const compare = (a, b) => numeric ? amount(a) - amount(b) || 0 : a.localeCompare(b, undefined, {numeric: true});
  const sign = direction === 'descending' ? -1 : 1;
  rows.sort((a, b) => {
    const [s, t] = [texts.get(a), texts.get(b)];
    // Rows without a value stand last in either direction.
    const order = direction === 'none' ? 0 : absent(s) - absent(t) || (absent(s) ? 0 : sign * compare(s, t));
    return order || a.dataset.order - b.dataset.order;
  });
  body.append(...rows);
}
function sortable(table) {
  [...table.tHead.rows[0].cells].forEach(head => {
    const name = head.textContent, button = Object.assign(document.createElement('button'), {type: 'button'});
    if (!name) return;
    button.className = 'sort';
    button.textContent = name;
    button.addEventListener('click', () => {
      const turns = ['none', 'descending', 'ascending'], now = turns.indexOf(head.getAttribute('aria-sort') ?? 'none');
      const plan = table.closest('details.plan');
      const tables = plan ? document.querySelectorAll('details.plan table') : [table];
      tables.forEach(each => sortTable(each, name, turns[(now + 1) % turns.length]));
    });
    head.replaceChildren(button);
  });
}
document.querySelectorAll('table').forEach(table => table.tBodies[0].rows.length > 1 && sortable(table));
const filter = document.getElementById('filter'), groups = [...document.querySelectorAll('details.plan')];
const opened = groups.map(group => group.open);
filter?.addEventListener('input', () => groups.forEach((group, i) => {
  const wanted = filter.value.trim().toLowerCase(), rows = [...group.querySelectorAll('tbody tr')];
  rows.forEach(row => { row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted); });
  group.hidden = rows.every(row => row.hidden);
  group.open = wanted ? !group.hidden : opened[i];
}));
document.querySelectorAll('.command button').forEach(button => {
  button.hidden = !navigator.clipboard;
  button.addEventListener('click', () => navigator.clipboard.writeText(button.previousElementSibling.textContent)
    .then(() => { button.textContent = 'Copied'; setTimeout(() => { button.textContent = 'Copy'; }, 1500); }));
});
