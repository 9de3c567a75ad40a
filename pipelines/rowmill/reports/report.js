'use strict';
// The report's script: links into folded sections, the facts of a token, and the search of rows.
// It adds text only as text: nothing from data becomes markup.

// ── Links into folded sections, and the contents ───────────────────────────────────────────────────
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let one = target; one; one = one.parentElement) if (one.tagName === 'DETAILS') one.open = true;
  if (target) target.scrollIntoView();
}
addEventListener('hashchange', openTarget);
if (location.hash) openTarget();

const links = new Map([...document.querySelectorAll('nav a')].map(
  one => [document.getElementById(decodeURIComponent(one.hash.slice(1))), one]));
function markContents() {
  let here = null;
  for (const [target, link] of links) if (target && target.getBoundingClientRect().top < 120) here = link;
  for (const link of links.values()) link.classList.toggle('here', link === here);
}
addEventListener('scroll', markContents, {passive: true});
markContents();

// ── Tokens ─────────────────────────────────────────────────────────────────────────────────────────
for (const sequence of document.querySelectorAll('.sequence')) {
  const tokens = [...sequence.querySelectorAll('.tokens i')];
  const places = new Map(tokens.map((one, at) => [one, at]));
  const shown = sequence.querySelector('.facts'), box = sequence.querySelector('.tokens');
  const columns = {};
  for (const [name, values] of Object.entries(sequence.dataset)) columns[name] = values.split(',');
  let current = -1;

  function describe(at) {
    const kind = tokens[at].parentElement.classList[0].replace('_', ' ');
    const label = columns.labels[at];
    const facts = [
      `token ${at}`, `id ${columns.ids[at]}`, JSON.stringify(tokens[at].textContent.replaceAll('↵\n', '\n')),
      label === '' ? 'label −100, no loss' : `label ${label}, trained`, `position ${columns.positions[at]}`,
      `segment ${columns.segments[at]}`, columns.messages[at] === '' ? kind : `${kind}, message ${columns.messages[at]}`,
    ];
    if (columns.weights) facts.push(`weight ${columns.weights[at]}`);
    return facts.join(' · ');
  }
  function select(at) {
    if (at < 0 || at >= tokens.length) return;
    if (current >= 0) tokens[current].classList.remove('current');
    current = at;
    tokens[at].classList.add('current');
    shown.textContent = describe(at);
  }
  function pick(event) {
    const at = places.get(event.target.closest('i'));
    if (at !== undefined) select(at);
  }
  box.addEventListener('pointerover', pick);
  box.addEventListener('click', pick);
  box.addEventListener('focus', () => { if (current < 0) select(0); });
  box.addEventListener('keydown', event => {
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -current,
      End: tokens.length - 1 - current};
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(Math.min(Math.max(current + moves[event.key], 0), tokens.length - 1));
    tokens[current].scrollIntoView({block: 'nearest'});
  });
  sequence.querySelector('.show-ids').addEventListener('change', event => {
    tokens.forEach((one, at) => { one.dataset.id = columns.ids[at]; });
    sequence.classList.toggle('ids', event.target.checked);
  });
}

// ── Rows ───────────────────────────────────────────────────────────────────────────────────────────
const rows = [...document.querySelectorAll('#rows-list .row')];
const texts = new Map();
const field = name => document.getElementById(`search-${name}`);
function fits(row, wanted) {
  if (wanted.dataset && row.dataset.dataset !== wanted.dataset) return false;
  if (wanted.reason && row.dataset.reason !== wanted.reason) return false;
  if (wanted.least !== '' || wanted.most !== '') {
    const length = row.dataset[wanted.unit];
    if (length === undefined) return false;
    if (wanted.least !== '' && +length < +wanted.least) return false;
    if (wanted.most !== '' && +length > +wanted.most) return false;
  }
  if (!wanted.text) return true;
  if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
  return texts.get(row).includes(wanted.text);
}
function searchRows() {
  const wanted = {text: field('text').value.toLowerCase(), dataset: field('dataset').value,
    reason: field('reason').value, least: field('min').value, most: field('max').value, unit: field('unit').value};
  let count = 0;
  for (const row of rows) {
    row.hidden = !fits(row, wanted);
    count += !row.hidden;
  }
  field('count').textContent = `${count} of ${rows.length}`;
}
if (rows.length) {
  for (const name of ['text', 'dataset', 'reason', 'min', 'max', 'unit']) field(name).addEventListener('input', searchRows);
  searchRows();
}
