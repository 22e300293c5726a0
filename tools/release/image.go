// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// The media types of the OCI image specification.
const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// descriptor refers to a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type config struct {
	platform
	Created string `json:"created"`
	Config  struct {
		Entrypoint []string
		Labels     map[string]string
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// layout is an OCI layout in an archive. The archive is not compressed, because its layers
// are compressed.
type layout struct {
	*layer
	blobs map[string]bool
}

// writeImage writes an image as an OCI layout into a new file, and returns the digest of
// the image. Each part is PLATFORM=PROGRAM or PLATFORM=PROGRAM,DIRECTORY, where DIRECTORY
// has further files of the image.
func writeImage(file, name, licences string, parts []string) (string, error) {
	l := layout{newLayer(), map[string]bool{}}
	if err := l.add("oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return "", err
	}
	all := index{SchemaVersion: 2, MediaType: indexType}
	version := ""
	for _, part := range parts {
		target, files, ok := strings.Cut(part, "=")
		system, architecture, slash := strings.Cut(target, "/")
		if !ok || !slash {
			return "", fmt.Errorf("%s is not PLATFORM=PROGRAM", part)
		}
		file, directory, _ := strings.Cut(files, ",")
		program, err := readProgram(file)
		if err != nil {
			return "", err
		}
		if version, err = program.version(); err != nil {
			return "", err
		}
		d, err := l.addPlatform(platform{architecture, system}, program, file, directory, licences)
		if err != nil {
			return "", err
		}
		all.Manifests = append(all.Manifests, d)
	}
	// Older versions of containerd select an image from a list by the version of Windows.
	// The image for hostProcess containers suits each version, so it is not a list.
	image := all.Manifests[0]
	switch {
	case image.Platform.OS != "windows":
		var err error
		if image, err = l.addJSON(indexType, all); err != nil {
			return "", err
		}
	case len(parts) > 1:
		return "", fmt.Errorf("an image with Windows has one platform, not %d", len(parts))
	default:
		image.Platform = nil
	}
	image.Annotations = map[string]string{
		"org.opencontainers.image.ref.name": version,
		"io.containerd.image.name":          "docker.io/library/" + name + ":" + version, // Kubernetes completes the name in this way
	}
	top, err := json.Marshal(index{2, indexType, []descriptor{image}})
	if err != nil {
		return "", err
	}
	if err := l.add("index.json", 0o644, top); err != nil {
		return "", err
	}
	content, err := l.close()
	if err != nil {
		return "", err
	}
	return image.Digest, os.WriteFile(file, content, 0o644)
}

// addPlatform adds the image for one platform and returns a descriptor of its manifest.
func (l layout) addPlatform(p platform, program *program, file, directory, licences string) (descriptor, error) {
	c := config{platform: p, Created: program.settings["vcs.time"]}
	c.Config.Labels = map[string]string{
		"org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.revision": program.settings["vcs.revision"],
		"org.opencontainers.image.source":   "https://github.com/kpng-project/kpng",
		"org.opencontainers.image.title":    "kpng",
		"org.opencontainers.image.version":  program.info.Main.Version,
	}
	c.RootFS.Type = "layers"
	m := manifest{SchemaVersion: 2, MediaType: manifestType}
	add := func(content []byte, err error) error {
		if err != nil {
			return err
		}
		var compressed bytes.Buffer
		w := gzip.NewWriter(&compressed)
		if _, err := w.Write(content); err != nil {
			return err
		}
		if err := w.Close(); err != nil {
			return err
		}
		d, err := l.addBlob(layerType, compressed.Bytes())
		c.RootFS.DiffIDs, m.Layers = append(c.RootFS.DiffIDs, digest(content)), append(m.Layers, d)
		return err
	}
	if directory != "" {
		if err := add(directoryLayer(directory)); err != nil {
			return descriptor{}, err
		}
	}
	programLayer := linuxLayer
	c.Config.Entrypoint = []string{"/kpng"}
	if p.OS == "windows" {
		programLayer = windowsLayer
		c.Config.Entrypoint = []string{"/kpng/kpng.exe"}
	}
	if err := add(programLayer(file, licences)); err != nil {
		return descriptor{}, err
	}
	var err error
	if m.Config, err = l.addJSON(configType, c); err != nil {
		return descriptor{}, err
	}
	d, err := l.addJSON(manifestType, m)
	d.Platform = &p
	return d, err
}

func (l layout) addJSON(mediaType string, of any) (descriptor, error) {
	text, err := json.Marshal(of)
	if err != nil {
		return descriptor{}, err
	}
	return l.addBlob(mediaType, text)
}

func (l layout) addBlob(mediaType string, content []byte) (descriptor, error) {
	d := descriptor{MediaType: mediaType, Digest: digest(content), Size: len(content)}
	if l.blobs[d.Digest] {
		return d, nil
	}
	l.blobs[d.Digest] = true
	return d, l.add("blobs/"+strings.Replace(d.Digest, ":", "/", 1), 0o644, content)
}

func digest(of []byte) string {
	sum := sha256.Sum256(of)
	return "sha256:" + hex.EncodeToString(sum[:])
}
