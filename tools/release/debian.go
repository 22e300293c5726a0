// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// licenceField matches a licence in the file "copyright" of a package of Debian.
var licenceField = regexp.MustCompile(`(?m)^License: *(\S.*)$`)

// debianComponents returns the components of packages of Debian, and the references to the
// other packages that each of them needs.
func debianComponents(files []string) (components []component, needs map[string][]string, err error) {
	refs, depends := map[string]string{}, map[string]string{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, nil, err
		}
		sum := sha256.Sum256(content)
		text, err := exec.Command("dpkg-deb", "--show", "--showformat", "${Package}\n${Version}\n${Architecture}\n${Pre-Depends},${Depends}", file).Output()
		if err != nil {
			return nil, nil, fmt.Errorf("read package %s: %w", file, err)
		}
		fields := strings.SplitN(string(text), "\n", 4)
		name, version := fields[0], fields[1]
		purl := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", name, url.QueryEscape(version), fields[2])
		c := component{
			Type: "library", Ref: purl, Supplier: &named{"Debian"}, Name: name, Version: version, PURL: purl,
			Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}},
		}
		if c.Licences, err = debianLicences(name, file); err != nil {
			return nil, nil, err
		}
		components = append(components, c)
		refs[name], depends[purl] = purl, fields[3]
	}
	needs = map[string][]string{}
	for _, c := range components {
		needs[c.Ref] = []string{}
		for part := range strings.FieldsFuncSeq(depends[c.Ref], func(r rune) bool { return r == ',' || r == '|' }) {
			name, _, _ := strings.Cut(strings.TrimSpace(part), " ")
			if ref, ok := refs[name]; ok && !slices.Contains(needs[c.Ref], ref) {
				needs[c.Ref] = append(needs[c.Ref], ref)
			}
		}
	}
	return components, needs, nil
}

// debianLicences returns the licences that the file "copyright" of a package names, with
// Debian's names.
func debianLicences(name, file string) ([]licence, error) {
	tree := exec.Command("dpkg-deb", "--fsys-tarfile", file)
	extract := exec.Command("tar", "-xO", "./usr/share/doc/"+name+"/copyright")
	pipe, err := tree.StdoutPipe()
	if err != nil {
		return nil, err
	}
	extract.Stdin = pipe
	if err := tree.Start(); err != nil {
		return nil, err
	}
	text, err := extract.Output()
	if wait := tree.Wait(); err == nil {
		err = wait
	}
	if err != nil {
		return nil, fmt.Errorf("read copyright of %s: %w", file, err)
	}
	var names []string
	for _, match := range licenceField.FindAllStringSubmatch(string(text), -1) {
		names = append(names, match[1])
	}
	if len(names) == 0 {
		names = []string{"see /usr/share/doc/" + name + "/copyright"}
	}
	slices.Sort(names)
	var licences []licence
	for _, name := range slices.Compact(names) {
		var l licence
		l.Licence.Name = name
		licences = append(licences, l)
	}
	return licences, nil
}
