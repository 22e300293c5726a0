// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// supplier is the name of the program's makers.
const supplier = "The kpng project"

// component is a component of a bill of materials in the format CycloneDX.
type component struct {
	Type     string    `json:"type"`
	Ref      string    `json:"bom-ref"`
	Supplier *named    `json:"supplier,omitempty"`
	Name     string    `json:"name"`
	Version  string    `json:"version,omitempty"`
	Hashes   []hash    `json:"hashes,omitempty"`
	Licences []licence `json:"licenses"`
	PURL     string    `json:"purl"`
	// Properties have the checksum of a module as go.sum has it. It is the SHA-256 of a
	// list with the hash of each file of the module.
	Properties []property `json:"properties,omitempty"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type named struct {
	Name string `json:"name"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type licence struct {
	Licence struct {
		ID   string `json:"id,omitempty"`   // the ID of a licence in the SPDX list
		Name string `json:"name,omitempty"` // the name of a licence that SPDX does not list
	} `json:"license"`
}

type dependencies struct {
	Ref string   `json:"ref"`
	On  []string `json:"dependsOn"`
}

// printSBOM writes a bill of materials of a program. It has Go's
// standard library, the modules in the program, and for each module those that it imports.
// The packages of Debian are further dependencies of the program. The bill has the time of the commit
// from which the program was built.
func printSBOM(to io.Writer, file string, debs []string) error {
	p, err := readProgram(file)
	if err != nil {
		return err
	}
	if _, err := p.version(); err != nil {
		return err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	modules, err := p.modules()
	if err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	type metadata struct {
		Timestamp string    `json:"timestamp"`
		Supplier  named     `json:"supplier"`
		Component component `json:"component"`
	}
	bom := struct {
		Schema       string         `json:"$schema"`
		BOMFormat    string         `json:"bomFormat"`
		SpecVersion  string         `json:"specVersion"`
		SerialNumber string         `json:"serialNumber"`
		Version      int            `json:"version"`
		Metadata     metadata       `json:"metadata"`
		Components   []component    `json:"components"`
		Dependencies []dependencies `json:"dependencies"`
	}{
		Schema: "http://cyclonedx.org/schema/bom-1.5.schema.json", BOMFormat: "CycloneDX", SpecVersion: "1.5",
		Version: 1,
	}
	refs := map[string]string{}
	for _, m := range modules {
		refs[m.Path] = m.purl()
	}
	for i, m := range modules {
		c, err := m.component()
		if err != nil {
			return err
		}
		if i == 0 {
			c.Type, c.Supplier = "application", &named{supplier}
			c.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum[:])}}
			bom.Metadata = metadata{p.settings["vcs.time"], named{supplier}, c}
		} else {
			bom.Components = append(bom.Components, c)
		}
		d := dependencies{c.Ref, []string{}}
		for _, path := range m.imports {
			d.On = append(d.On, refs[path])
		}
		bom.Dependencies = append(bom.Dependencies, d)
	}
	packages, needs, err := debianComponents(debs)
	if err != nil {
		return err
	}
	bom.Components = append(bom.Components, packages...)
	for _, c := range packages {
		bom.Dependencies[0].On = append(bom.Dependencies[0].On, c.Ref)
		bom.Dependencies = append(bom.Dependencies, dependencies{c.Ref, needs[c.Ref]})
	}
	// The bills of a program with and without packages have different numbers.
	identity := hex.EncodeToString(sum[:])
	for _, c := range packages {
		identity += c.Hashes[0].Content
	}
	bom.SerialNumber = serialNumber(sha256.Sum256([]byte(identity)))
	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(bom)
}

// serialNumber makes a UUID of version 8 (RFC 9562) from a hash.
func serialNumber(sum [sha256.Size]byte) string {
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// googlePatents is the ID of a text beside a licence. SPDX has no such ID.
const googlePatents = "GooglePatentsFile"

func (m *linked) purl() string {
	return "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
}

func (m *linked) component() (component, error) {
	c := component{Type: "library", Ref: m.purl(), Name: m.Path, Version: m.Version, PURL: m.purl()}
	if encoded, ok := strings.CutPrefix(m.Sum, "h1:"); ok { // SHA-256 of the list of the module's files
		sum, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return c, fmt.Errorf("read checksum of %s: %w", m.Path, err)
		}
		c.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum)}}
		c.Properties = []property{{"go.sum", m.Sum}}
	}
	var ids []string
	for _, file := range m.licences {
		text, err := os.ReadFile(file)
		if err != nil {
			return c, err
		}
		for _, match := range licensecheck.Scan(text).Match {
			if match.ID != googlePatents {
				ids = append(ids, match.ID)
			}
		}
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		var l licence
		l.Licence.ID = id
		c.Licences = append(c.Licences, l)
	}
	if len(ids) == 0 {
		return c, fmt.Errorf("module %s has no known licence in %s", m.Path, strings.Join(m.licences, ", "))
	}
	return c, nil
}
