"""HTML as a person sees it, encodings as browsers take them, and books with common mistakes."""

import pytest
from test_documents import epub, said
from test_docx import zipped

from tasks.forms import contents


def text(markup: str | bytes, name: str = "x.html") -> str:
    markup = markup if isinstance(markup, bytes) else markup.encode()
    ((found, _, _),) = contents(markup, name).pieces
    return found


@pytest.mark.parametrize(("markup", "seen"), [
    # raised, lowered, struck out
    ("10<sup>5</sup> or 10<sup>-5</sup>, x<sup>n+1</sup>", "10^5 or 10^-5, x^(n+1)"),
    ("H<sub>2</sub>O, x<sub>i</sub><sup>2</sup>, a<sub> i j</sub>", "H_2O, x_i^2, a_(i j)"),
    ("CHF 950.<sup><a href='#n'>12</a></sup> and<sup>[3]</sup>", "CHF 950.^12 and^[3]"),
    ("e<sup>x<sup>2</sup></sup>, the 21<sup>st</sup>", "e^x^2, the 21st"),
    ("10<sup><span style='vertical-align: super'> 5 </span></sup>km<sup></sup>", "10^5 km"),
    ("10<span style='font-size:5pt; vertical-align: Super'>5</span>", "10^5"),
    ("<style>/* { */ i.c3, .c3 {vertical-align:super}</style>10<b class='a c3'>5</b>", "10^5"),
    ("<style>b.c3 {vertical-align:super !important}</style>10<b class='a c3'>5</b>", "10^5"),
    ("<del>CHF 900</del> <ins>CHF 950</ins>", "[struck out: CHF 900] CHF 950"),
    ("<s style='text-decoration:line-through'>a</s>", "[struck out: a]"),
    ("<i style='text-decoration:line-through'>b</i>", "[struck out: b]"),
    # hidden
    ("a<p hidden>no<p style='color:red;display : none'>no<p style='VISIBILITY:hidden'>no", "a"),
    ("a<dialog>no</dialog><div popover>no</div> <input type=hidden value=no> b", "a b"),
    ("a<details><summary>b</summary>c</details><dialog open>d</dialog>", "a\n\nb\nc\n\nd"),
    ("<style>.n,p#o{display:none}</style>a<b class=n>no</b><p id=o>no<p>b", "a\nb"),
    ("<style>@media print{.k{display:none}} @import 'x'; .k .l{display:none}</style>"
     "<style media=print>.l{display:none}</style><p class=k>a<b class=l>b", "ab"),
    ("<p aria-hidden=true>a<template>no</template><noscript>no</noscript><nav>no</nav>", "a"),
    # rows and lists
    ("<table><caption>C<tr><th>N<th>M<tr><td><p>A</p><td>30<br>years<tr><td><td>"
     "<ul><li>a<li>b</ul></table>", "C\n\nN\tM\nA\t30 years\n\ta b"),
    ("<table><tr><td>a<td><table><tr><td>b<td>c<tr><td>d<td>e</table></table>", "a\nb\tc\nd\te"),
    ("<table><tr><td><h1>T</h1><p>a<p>b</table>", "T\n\na\n\nb"),
    ("<table><tr><td>a<td><pre>b<br>  c</pre></table>", "a\tb\n  c"),
    ("<ol start=3><li>c<li value=7>g<ol type=a><li>x<li>y</ol><li>h</ol>",
     "3. c\n7. g\n\na. x\nb. y\n\n8. h"),
    ("<ol reversed><li>a<li>b</ol><ol type=i start=9><li>c<li>d<li>e</ol>",
     "a\nb\n\nix. c\nx. d\nxi. e"),
    ("<ol type=I start=14><li>a</ol><ol type=A start=x><li>b</ol><ul><li>c</ul>",
     "XIV. a\n\nA. b\n\nc"),
    # fields and pictures
    ("<label>Name <input value='Anna L.'></label> <input type=checkbox checked> yes "
     "<input type=radio> no", "Name Anna L. [x] yes [ ] no"),
    ("<select><option>A<option selected>B</select>, <select><option>C<option>D</select>", "B , C"),
    ("<textarea>a\n  b</textarea><button>c</button><input type=password value=no>", "a\n  b\nc"),
    ("<img src=x alt='A\nbridge'> x", "[picture: A bridge] x"),
    ("<svg><title>no</title><text>Axis</text><text>2020</text></svg>", "Axis\n\n2020"),
    # formulas, words and blanks
    ("<math><mi>E</mi> <mo>=</mo> <mi>m</mi>\n<msup> <mi>c</mi> <mn>2</mn> </msup></math>.",
     "E=mc^2."),
    ("<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac></math> "
     "<math><msup><mi>x</mi><mfrac><mn>2</mn><mn>3</mn></mfrac></msup></math>",
     "(a+b)/2 x^(2/3)"),
    ("<math><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup></math> <math><mi>y</mi>"
     "<annotation>no</annotation></math>", "x_i^2 y"),
    ("<math><mroot><mn>8</mn><mn>3</mn></mroot></math>", "root(8,3)"),
    ("<span class='katex'><math><msqrt><mi>x</mi><mn>2</mn></msqrt></math><span class="
     "katex-html aria-hidden=true>no</span></span>", "√(x2)"),
    ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby> <q>a</q>", "漢(kan) “a”"),
    ("Donau<wbr>dampf&shy;schiff &euro;40 &frac12; 10&nbsp;000", "Donaudampfschiff €40 ½ 10 000"),
    ("<p>A<b>nn</b>a <i> left</i> </p>\n\n<pre>  a\n   b</pre>", "Anna left\n\n  a\n   b"),
    ("Anna<![n00b x> left<!-- no --><? no ?>.", "Anna left."),
])  # fmt: skip
def test_html_is_read_as_a_person_sees_it(markup, seen):
    assert text(markup) == seen


@pytest.mark.parametrize(("label", "encoding", "words"), [
    ("iso-8859-1", "cp1252", "“The bridge costs €40 – Müller’s”"),
    ("us-ascii", "cp1252", "€40"), ("latin-1", "cp1252", "€40"),
    ("iso-8859-9", "cp1254", "€ İstanbul"), ("gb2312", "gbk", "朱镕基"), ("GBK", "gb18030", "朱镕基 €"),
    ("shift_jis", "cp932", "㈱日本①"), ("x-sjis", "cp932", "㈱日本①"),
    ("ks_c_5601-1987", "cp949", "똠방각하"), ("euc-kr", "cp949", "똠방각하"),
    ("euc-jp", "euc_jis_2004", "㈱日本①"), ("big5", "big5hkscs", "香港"), ("koi8-r", "koi8-r", "Анна"),
    ("windows-1251", "cp1251", "Анна"), ("utf-16", "utf-8", "né"), ("utf8", "utf-8", "né"),
])  # fmt: skip
def test_a_label_means_what_browsers_take_it_for(label, encoding, words):
    heads = (
        f"<meta charset={label}>",
        f"<!-- <meta charset=koi8-u> --><META content='text/html; charset={label}' http-equiv=x>",
        f"<?xml version='1.0' encoding='{label}'?><html>",
    )
    for head in heads:
        assert text(f"{head}<p>{words}".encode(encoding)) == words
    xml = f'<?xml version="1.0" encoding="{label}"?><a>{words}</a>'.encode(encoding)
    assert words in text(xml, "x.xml")


def package(head: str = "", title: str = "A Book", **items: str) -> str:
    """Make a package that Word and others would: ids and hrefs as they are given."""
    manifest = "".join(f"<item id='{key}' {value}/>" for key, value in items.items())
    spine = "".join(f"<itemref idref='{key}'/>" for key in items)
    return (
        f"{head}<package><metadata xmlns:dc='d'><meta name='x'/><dc:title>{title}</dc:title>"
        f"</metadata><manifest>{manifest}</manifest><spine>{spine}</spine></package>"
    )


def linked(href: str) -> bytes:
    """Make a book whose only chapter is named so."""
    opf = package("<?xml version='1.0' encoding='utf-8'?>", a=f"href='{href}'")
    return epub("", **{"O__b___opf": opf, "O__Text__Ch 1___xhtml": "<p>Anna."})


XHTML = (
    "<html xmlns='http://www.w3.org/1999/xhtml'><head><title/><script src='x'/></head><body>"
    "<p>Anna<br/>left.<a id='p5'/> <![CDATA[1 < 2]]></p><sup/></body></html>"
)
PICTURES = (
    "<p>Anna<b hidden>x</b><p hidden></p><img src='data:image/png;base64,A'><img alt=''><canvas>"
    "</canvas><iframe srcdoc=x></iframe><video>x</video><nav>x</nav>"
)
PROGRAM = "# -*- coding: koi8-r -*-\n'Анна'"
CHAT = "31.12.23, 21:41 - Ann: Hi\n31.12.23, 21:42 - Bo: Hi\n"
BACKSLASHES = {
    "META-INF\\container.xml": "<rootfile full-path='O/b.opf'/>", "O\\t\\c.html": "<p>Anna.",
    "O\\b.opf": package(a="href='t/c.html'"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "name", "seen", "remark"), [
    # what a script would show
    ("<body hidden><p>Anna", "x.html", "Anna", ""),
    ("<style>body{visibility:hidden}</style><p>Anna", "x.html", "Anna", ""),
    ("<body style='display:none'><p>Anna<p hidden>no", "x.html", "Anna", "hidden"),
    # elements of XML that end at once
    ("<?xml version='1.0'?>" + XHTML, "x.html", "Anna\nleft. 1 < 2", ""),
    (epub(XHTML), "a.epub", "Anna\nleft. 1 < 2", ""),
    # what is seen and not read
    (PICTURES, "x.html", "Anna",
     "x.html: left out: 1 passage that is hidden, 3 pictures without words, 1 frame, "
     "1 recording, 1 navigation."),
    (epub("<p>Anna<img src=a>", "<img src=b>"), "a.epub", "Anna",
     "a.epub: left out: 2 pictures without words."),
    # encodings
    (PROGRAM.encode("koi8-r"), "a.py", PROGRAM, ""),
    (CHAT.encode("utf-16-le"), "chat.txt", CHAT, "UTF-16-LE"),
    (epub("<p>Anna left.".encode("utf-16-be")), "a.epub", "Anna left.", "UTF-16-BE"),
    *((words.encode(encoding), "x.txt", words.replace("\r", ""), encoding.upper())
      for encoding in ("utf-16-le", "utf-16-be")
      for words in ("The price is 950 €.", "Анна уехала.", "合同由朱镕基签署。\n", "“né”\r\n")),
    ("<html><p>“né”\r\n".encode("utf-16-le"), "x.html", "“né”", "UTF-16-LE"),
    (b"one\ntwo" + bytes(512) + b"three\n" + bytes(3), "a.log", "one\ntwo\nthree\n\n",
     "a.log: 515 NULs"),
    # books: a table of contents is no chapter, and a chapter is found however it is named
    (epub("<nav epub:type='toc'><h1>Contents</h1><ol><li>One</ol></nav>", "<p>Anna."), "a.epub",
     "Anna.", "1 navigation"),
    *((linked(href), "a.epub", "Anna.", "")
      for href in ("Text/Ch 1.xhtml", "Text/Ch%201.xhtml#a", "../O/Text/./Ch%201.xhtml")),
    (zipped(**BACKSLASHES), "a.epub", "Anna.", ""),
])  # fmt: skip
def test_a_file_is_read_and_what_is_left_out_is_said(content, name, seen, remark):
    found = contents(content.encode() if isinstance(content, str) else content, name)
    ((words, number, _),) = found.pieces
    assert (words, number) == (seen, int(name == "a.epub"))
    assert remark in found.remark and bool(remark) == bool(found.remark)


LOG = b"a line\n" * 99


@pytest.mark.parametrize(("content", "name", "why"), [
    (b"<div id=app hidden><p>Anna</div>", "x.html", "1 passage that is hidden"),
    (b"<frameset><frame><frame></frameset>", "x.html", "2 frames"),
    # an encoding is not guessed
    ("<meta charset=cp-437><p>né".encode("cp437"), "x.html", "cp-437, which is unknown"),
    (b"<meta charset=gb2312><p>n\xff", "x.html", "line 1 is not gb2312"),
    ("<meta charset=utf-8>né".encode("latin-1"), "x.html", "line 1 is not utf-8"),
    ("Анна".encode("cp1251"), "x.txt", "line 1 is not UTF-8"),
    ("né\nné\n".encode() + "né\n".encode("latin-1"), "x.txt", "line 3 is not UTF-8"),
    *((binary, "a.log", "")
      for binary in (LOG + b"\x01\0\0", bytes(99), b"a\0b\0", b"\x7fELF\0\0", b"a\x01b\0\0")),
    *((epub("", O__b___opf=opf), "a.epub", "") for opf in ("", "<package", "\0\1", package())),
])  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(content, name, why):
    assert why in said(content, name)


@pytest.mark.parametrize(("title", "seen"), [
    ("Hide & Seek", "Hide & Seek"), ("Hide&nbsp;&amp;&nbsp;Seek", "Hide & Seek"),
    ("Caf&eacute; &#8211; R&D", "Café – R&D"), ("a &lt;b&gt; c", "a <b> c"),
])  # fmt: skip
def test_a_title_with_a_bare_ampersand_is_read(title, seen):
    book = epub("", O__b___opf=package(title=title, **{"a&b": "href='c.html'"}),
                O__c___html="<p>Anna & Bo")  # fmt: skip
    found = contents(book, "a.epub")
    assert found.title == seen and found.pieces == [("Anna & Bo", 1, "")]
