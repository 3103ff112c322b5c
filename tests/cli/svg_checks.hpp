// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

using Points = std::vector<std::pair<double, double>>;

/// The points of the line with this style.
inline Points points_of(const std::string& svg, const std::string& style) {
  const std::string start = "class=\"line " + style + "\" points=\"";
  const std::size_t at = svg.find(start);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + start.size();
  std::istringstream text(svg.substr(begin, svg.find('"', begin) - begin));
  Points points;
  char comma = ' ';
  for (double x = 0, y = 0; text >> x >> comma >> y;) points.emplace_back(x, y);
  return points;
}

/// Elements are closed in their order, attributes are quoted, and no bare '<' or '&' stands in
/// text: what makes XML of this simple kind (no comments, no sections) well-formed.
inline std::string flaw_of(const std::string& xml) {
  std::vector<std::string> open;
  std::size_t at = 0;
  while (at < xml.size()) {
    if (xml[at] == '&') {
      const std::string entity = xml.substr(at, xml.find(';', at) - at + 1);
      if (entity != "&amp;" && entity != "&lt;" && entity != "&gt;" && entity != "&quot;") {
        return "bare &: " + xml.substr(at, 20);
      }
    }
    if (xml[at] != '<') {
      if (open.empty() && std::isspace(static_cast<unsigned char>(xml[at])) == 0)
        return "text outside";
      ++at;
      continue;
    }
    const std::size_t end = xml.find('>', at);
    if (end == std::string::npos) return "no >";
    const std::string tag = xml.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos) return "< within " + tag;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return "quotes of " + tag;
    const std::string name =
        tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" /\n", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "closes " + tag;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : "open: " + open.back();
}

}  // namespace kvferry::test
